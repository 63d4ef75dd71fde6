//! Learning rates that depend on the step.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A learning rate schedule: a factor per update that multiplies the rate of every group.
///
/// The factor rises linearly to 1 during warm-up, then follows a curve of Hugging Face's
/// `get_scheduler`. The values are the same except for two cases: the first update of a warm-up has
/// a rate above 0, and a cosine stays at its floor after the last step.
///
/// # Determinism
///
/// Depends on the number of updates alone, and is identical to the bit on every platform.
///
/// # Examples
///
/// ```
/// use dist_train::Schedule;
///
/// let schedule = Schedule::cosine(1000).warmup(100).floor(0.1);
/// assert_eq!(schedule.factor(0), 0.01); // the first update
/// assert_eq!(schedule.factor(99), 1.0);
/// assert_eq!(schedule.factor(550), 0.55);
/// assert_eq!(schedule.factor(5000), 0.1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    warmup: u64,
    curve: DecayCurve,
    floor: f64,
}

/// The curve after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum DecayCurve {
    Constant,
    /// Falls linearly to the floor, which it reaches after this number of updates.
    Linear(u64),
    /// Falls like half a cosine wave to the floor, which it reaches after this number of updates.
    Cosine(u64),
    InverseSqrt,
}

impl Schedule {
    /// Keeps the factor at 1.
    pub fn constant() -> Self {
        Self::new(DecayCurve::Constant)
    }

    /// Falls linearly from 1 at the end of the warm-up to the floor after `steps` updates,
    /// including the warm-up.
    pub fn linear(steps: u64) -> Self {
        Self::new(DecayCurve::Linear(steps))
    }

    /// Follows half a cosine wave from 1 at the end of the warm-up to the floor after `steps`
    /// updates, including the warm-up. (Loshchilov and Hutter, SGDR, arXiv 1608.03983, without
    /// restarts.)
    pub fn cosine(steps: u64) -> Self {
        Self::new(DecayCurve::Cosine(steps))
    }

    /// Falls with the inverse square root of the number of updates, in units of the warm-up's
    /// length, or of 10,000 without a warm-up. (Vaswani et al., "Attention Is All You Need", arXiv
    /// 1706.03762.)
    pub fn inverse_sqrt() -> Self {
        Self::new(DecayCurve::InverseSqrt)
    }

    fn new(curve: DecayCurve) -> Self {
        Self { warmup: 0, curve, floor: 0.0 }
    }

    /// Sets the number of updates over which the factor rises to 1; 0 by default.
    #[must_use]
    pub fn warmup(self, steps: u64) -> Self {
        Self { warmup: steps, ..self }
    }

    /// Sets the least factor after the warm-up, onto which the curve is scaled; 0 by default.
    #[must_use]
    pub fn floor(self, floor: f64) -> Self {
        Self { floor, ..self }
    }

    /// Returns the factor of the update after `steps` updates.
    pub fn factor(&self, steps: u64) -> f64 {
        if steps < self.warmup {
            return (steps + 1) as f64 / self.warmup as f64;
        }
        self.floor + (1.0 - self.floor) * self.height(steps - self.warmup)
    }

    /// Returns the height of the curve, from 0 to 1, `n_after` updates after the warm-up.
    fn height(&self, n_after: u64) -> f64 {
        let progress = |steps: u64| {
            let length = steps.saturating_sub(self.warmup);
            if n_after < length { n_after as f64 / length as f64 } else { 1.0 }
        };
        match self.curve {
            DecayCurve::Constant => 1.0,
            DecayCurve::Linear(steps) => 1.0 - progress(steps),
            DecayCurve::Cosine(steps) => 0.5 * (1.0 + libm::cos(PI * progress(steps))),
            DecayCurve::InverseSqrt => {
                let unit = if self.warmup == 0 { 10_000.0 } else { self.warmup as f64 };
                (unit / (n_after as f64 + unit)).sqrt()
            }
        }
    }

    /// Rejects floors outside 0 to 1, and warm-ups as long as the schedule.
    pub(crate) fn check(&self) -> Result<()> {
        let is_fraction = (0.0..=1.0).contains(&self.floor);
        let name = "the least factor of the learning rate";
        Error::check_setting(is_fraction, name, self.floor, "from 0 to 1")?;
        let is_shorter = match self.curve {
            DecayCurve::Linear(steps) | DecayCurve::Cosine(steps) => self.warmup < steps,
            DecayCurve::Constant | DecayCurve::InverseSqrt => true,
        };
        let name = "the number of warm-up steps";
        let expected = "less than the steps of the schedule";
        Error::check_setting(is_shorter, name, self.warmup as f64, expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps and values computed with the functions behind `get_scheduler` of transformers 5.23.0,
    /// for 10 warm-up steps of 50 in total.
    const STEPS: [u64; 7] = [10, 11, 17, 30, 42, 49, 50];
    const LINEAR: [f64; 7] = [1.0, 0.975, 0.825, 0.5, 0.2, 0.025, 0.0];
    const COSINE: [f64; 7] = [
        1.0,
        0.998_458_666_866_564,
        0.926_320_082_177_046_1,
        0.5,
        0.095_491_502_812_526_33,
        0.001_541_333_133_436_018,
        0.0,
    ];
    const INVERSE_SQRT: [f64; 7] = [
        1.0,
        0.953_462_589_245_592_2,
        0.766_964_988_847_370_4,
        0.577_350_269_189_625_8,
        0.487_950_036_474_266_55,
        0.451_753_951_452_625_65,
        0.447_213_595_499_957_9,
    ];

    fn assert_curve(schedule: Schedule, expected: [f64; 7]) {
        for (step, expected) in STEPS.into_iter().zip(expected) {
            let found = schedule.warmup(10).factor(step);
            assert!((found - expected).abs() < 1e-15, "{schedule:?}, {step}: {found}, {expected}");
        }
    }

    #[test]
    fn curves_match_hugging_face() {
        assert_curve(Schedule::constant(), [1.0; 7]);
        assert_curve(Schedule::linear(50), LINEAR);
        assert_curve(Schedule::cosine(50), COSINE);
        assert_curve(Schedule::inverse_sqrt(), INVERSE_SQRT);
        for (step, expected) in [(1, 0.999_950_003_749_687_7), (39_999, 0.447_218_067_702_996_1)] {
            assert!((Schedule::inverse_sqrt().factor(step) - expected).abs() < 1e-15);
        }
        assert_curve(Schedule::cosine(50).floor(0.1), COSINE.map(|height| 0.1 + 0.9 * height));
    }

    #[test]
    fn warm_up_rises_in_equal_steps() {
        for schedule in [Schedule::constant(), Schedule::linear(9), Schedule::cosine(9).floor(0.5)]
        {
            let factors: Vec<f64> = (0..5).map(|step| schedule.warmup(4).factor(step)).collect();
            assert_eq!(factors, [0.25, 0.5, 0.75, 1.0, 1.0]);
        }
    }

    #[test]
    fn factor_stays_at_the_floor() {
        for schedule in [Schedule::linear(50), Schedule::cosine(50)] {
            for step in [50, 60, 100, u64::MAX] {
                assert!(schedule.factor(step).abs() < 1e-15);
                assert!((schedule.floor(0.25).factor(step) - 0.25).abs() < 1e-15);
            }
        }
    }

    #[test]
    fn invalid_schedules_are_rejected() {
        for floor in [-0.1, 1.5, f64::NAN] {
            Schedule::constant().floor(floor).check().unwrap_err();
        }
        let error = Schedule::linear(10).warmup(10).check().unwrap_err();
        assert_eq!(
            error.to_string(),
            "the number of warm-up steps is 10, it must be less than the steps of the schedule"
        );
        Schedule::cosine(0).check().unwrap_err();
        Schedule::cosine(10).warmup(9).check().unwrap();
        Schedule::inverse_sqrt().warmup(10).floor(1.0).check().unwrap();
    }

    #[test]
    fn schedules_serialize_by_name() {
        let schedule = Schedule::cosine(50).warmup(10).floor(0.1);
        let json = serde_json::to_string(&schedule).unwrap();
        assert_eq!(json, r#"{"warmup":10,"curve":{"cosine":50},"floor":0.1}"#);
        assert_eq!(serde_json::from_str::<Schedule>(&json).unwrap(), schedule);
    }
}
