//! The sampling option of `generate` and `train`.

use candle_distributed::{finetune::Generation, types::Seed};

/// The sampling option.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct SamplingArgs {
    /// Draw tokens at random, with the logits divided by this: 1 keeps the model's probabilities,
    /// less favors likelier tokens [default: always the likeliest token]
    #[arg(long, value_name = "T", requires = "prompt")]
    temperature: Option<f64>,
}

impl SamplingArgs {
    /// Returns the option as the user types it, after a space, if it was given.
    pub(crate) fn option_string(&self) -> Option<String> {
        self.temperature.map(|temperature| format!(" --temperature {temperature}"))
    }

    /// Returns the options of a generation that draws tokens with this seed.
    pub(crate) fn generation(&self, seed: u64) -> Generation {
        let options = Generation::default().with_seed(Seed::new(seed));
        match self.temperature {
            Some(temperature) => options.with_temperature(temperature),
            None => options,
        }
    }
}
