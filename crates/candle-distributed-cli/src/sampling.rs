//! The option by which `generate` and `train` draw tokens at random.

use candle_distributed::{finetune::Generation, types::Seed};

/// How tokens are chosen.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct SamplingArgs {
    /// Choose tokens at random, by their logits divided by this: 1 as the model says, less for the
    /// likelier ones [default: the likeliest token each time]
    #[arg(long, value_name = "T", requires = "prompt")]
    temperature: Option<f64>,
}

impl SamplingArgs {
    /// Returns the option as it is typed, with a space before it, if it was given.
    pub(crate) fn typed(&self) -> Option<String> {
        self.temperature.map(|temperature| format!(" --temperature {temperature}"))
    }

    /// Returns the options of a text whose random tokens have this seed.
    pub(crate) fn generation(&self, seed: u64) -> Generation {
        let options = Generation::default().with_seed(Seed::new(seed));
        match self.temperature {
            Some(temperature) => options.with_temperature(temperature),
            None => options,
        }
    }
}
