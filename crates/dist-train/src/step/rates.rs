//! Learning rates of a model's groups.

use crate::{
    error::{Result, training::TrainingError},
    progress::{Progress, TrainerState},
    schedule::Schedule,
    step::options::check_rate,
};

/// The learning rates of a model's groups, the same in every process.
#[derive(Clone, Debug)]
pub(crate) struct Rates {
    /// The name of each group and its rate without the schedule's factor, in group order.
    base_rates: Vec<(String, f64)>,
    schedule: Schedule,
}

impl Rates {
    pub(crate) fn new(groups: &[String], base_rates: Vec<f64>, schedule: Schedule) -> Self {
        Self { base_rates: groups.iter().cloned().zip(base_rates).collect(), schedule }
    }

    pub(crate) fn set_all(&mut self, rate: f64) -> Result<()> {
        check_rate(rate)?;
        self.base_rates.iter_mut().for_each(|(_, base_rate)| *base_rate = rate);
        Ok(())
    }

    pub(crate) fn set_group(&mut self, name: &str, rate: f64) -> Result<()> {
        let Some((_, base_rate)) = self.base_rates.iter_mut().find(|(group, _)| group == name)
        else {
            let reason = format!("there is no group named {name:?}");
            return Err(TrainingError::option("set_group_learning_rate", reason).into());
        };
        check_rate(rate)?;
        *base_rate = rate;
        Ok(())
    }

    pub(crate) fn set_schedule(&mut self, schedule: Schedule) -> Result<()> {
        schedule.check()?;
        self.schedule = schedule;
        Ok(())
    }

    /// Returns the rate of each group, with the schedule's factor, in the update after `steps`
    /// updates.
    pub(crate) fn after(&self, steps: u64) -> Vec<f64> {
        let factor = self.schedule.factor(steps);
        self.base_rates.iter().map(|(_, base_rate)| base_rate * factor).collect()
    }

    /// Returns the rates and schedule of a checkpoint. A group that the checkpoint does not have
    /// keeps its rate.
    pub(crate) fn with_state(&self, state: &TrainerState) -> Result<Self> {
        let mut rates = self.clone();
        for (group, base_rate) in &mut rates.base_rates {
            if let Some(&rate) = state.learning_rates.get(group) {
                check_rate(rate)?;
                *base_rate = rate;
            }
        }
        rates.set_schedule(state.schedule)?;
        Ok(rates)
    }

    /// Returns the state for a checkpoint.
    pub(crate) fn state(&self, progress: Progress) -> TrainerState {
        let learning_rates = self.base_rates.iter().cloned().collect();
        TrainerState { progress, learning_rates, schedule: self.schedule }
    }
}
