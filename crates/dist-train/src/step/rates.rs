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
    group_rates: Vec<(String, f64)>,
    schedule: Schedule,
}

impl Rates {
    pub(crate) fn new(groups: &[String], own: Vec<f64>, schedule: Schedule) -> Self {
        Self { group_rates: groups.iter().cloned().zip(own).collect(), schedule }
    }

    pub(crate) fn set_all(&mut self, rate: f64) -> Result<()> {
        check_rate(rate)?;
        self.group_rates.iter_mut().for_each(|(_, own)| *own = rate);
        Ok(())
    }

    pub(crate) fn set_group(&mut self, name: &str, rate: f64) -> Result<()> {
        let Some((_, own)) = self.group_rates.iter_mut().find(|(group, _)| group == name) else {
            return Err(TrainingError::UnknownGroup { name: name.to_owned() }.into());
        };
        check_rate(rate)?;
        *own = rate;
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
        self.group_rates.iter().map(|(_, own)| own * factor).collect()
    }

    /// Returns the rates and schedule of a checkpoint. A group that the checkpoint does not have
    /// keeps its rate.
    pub(crate) fn with_state(&self, state: &TrainerState) -> Result<Self> {
        let mut rates = self.clone();
        for (group, own) in &mut rates.group_rates {
            if let Some(&rate) = state.learning_rates.get(group) {
                check_rate(rate)?;
                *own = rate;
            }
        }
        rates.set_schedule(state.schedule)?;
        Ok(rates)
    }

    /// Returns the state for a checkpoint.
    pub(crate) fn state(&self, progress: Progress) -> TrainerState {
        let learning_rates = self.group_rates.iter().cloned().collect();
        TrainerState { progress, learning_rates, schedule: self.schedule }
    }
}
