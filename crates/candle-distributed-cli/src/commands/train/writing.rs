//! The sample that `train` generates with the trained model at the end of a run.

use std::path::Path;

use candle_distributed::{
    finetune::{
        self, PreparedRun, Prompt,
        run::{open_generator, sample_in},
        spec::Spec,
    },
    types::human::HumanBytes,
};

use crate::{error::Result, hint, output, sampling::SamplingArgs};

/// The maximum number of new tokens with a subword tokenizer: a few lines of text.
const MAX_TOKENS: usize = 64;
/// The maximum number of new tokens if tokens are bytes.
const MAX_BYTES: usize = 320;

/// The options of the sample.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct WritingArgs {
    /// Prompt of the sample that the model generates at the end, like `generate` with the run's
    /// folder [default: the beginning of the first text]
    #[arg(long, value_name = "TEXT", conflicts_with = "dry_run")]
    prompt: Option<String>,
    /// Do not generate a sample at the end (rank 0 needs memory for the full model in single
    /// precision)
    #[arg(long, conflicts_with_all = ["prompt", "dry_run"])]
    no_sample: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
}

impl WritingArgs {
    /// Returns the options to repeat when the run is resumed, each after a space.
    pub(super) fn option_string(&self) -> String {
        let prompt =
            self.prompt.as_ref().map(|prompt| format!(" --prompt {}", hint::in_shell(prompt)));
        let no_sample = self.no_sample.then(|| " --no-sample".to_owned());
        [prompt, self.sampling.option_string(), no_sample].into_iter().flatten().collect()
    }

    /// Rejects an invalid prompt before the model is trained.
    pub(super) fn check(&self, run: &PreparedRun) -> Result<()> {
        let Some(prompt) = &self.prompt else { return Ok(()) };
        self.sampling.generation(run.spec.seed).check().map_err(finetune::Error::from)?;
        let context = run.folder.decoder().config().max_position_embeddings;
        Prompt::Text(prompt).ids(run.folder.tokenizer(), context)?;
        Ok(())
    }

    /// Returns the prompt, or `None` if no sample is generated.
    pub(super) fn prompt(&self, run: &PreparedRun) -> Result<Option<String>> {
        /// The length of the default prompt: enough to show the kind of text.
        const N_PROMPT_TOKENS: usize = 16;
        if self.no_sample {
            return Ok(None);
        }
        if let Some(prompt) = &self.prompt {
            return Ok(Some(prompt.clone()));
        }
        let ids: Vec<u32> = run.examples().ids(0).iter().take(N_PROMPT_TOKENS).copied().collect();
        let beginning = run.folder.tokenizer().decode(&ids, false)?;
        // The last token may end within a character.
        let prompt = beginning.trim_end_matches(char::REPLACEMENT_CHARACTER);
        Ok((!prompt.is_empty()).then(|| prompt.to_owned()))
    }

    /// Generates a sample with the model of the complete run in `path`, prints it, and saves it for
    /// the report. If generation fails, the command only warns, since the run is complete.
    pub(super) fn write_sample(&self, path: &Path, prompt: &str, spec: &Spec) -> Result<()> {
        match self.generate(path, prompt, spec) {
            Ok(text) => output::model_text(&format!("the model writes:\n{text}")),
            Err(error) => {
                output::warning(format_args!("cannot generate a sample: {}", error.chain()));
                Ok(())
            }
        }
    }

    fn generate(&self, path: &Path, prompt: &str, spec: &Spec) -> Result<String> {
        let generator = open_generator(path, None)?;
        let max_tokens = if spec.finetune.folder.is_some() { MAX_TOKENS } else { MAX_BYTES };
        let options = self.sampling.generation(spec.seed).with_max_tokens(max_tokens);
        let text = generator.generate(Prompt::Text(prompt), &options)?.text;
        output::file(&sample_in(path), text.as_bytes())?;
        Ok(text)
    }
}

/// Warns that the full model is too large to generate a sample.
pub(super) fn warn_too_large(bytes: u64) {
    output::warning(format_args!(
        "cannot generate a sample: the full model needs about {}, more than the memory limit of \
         this process",
        HumanBytes(bytes.into())
    ));
    output::hint(hint::GENERATE_LATER);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_sample_is_repeated_on_resume() {
        let args = WritingArgs { prompt: None, no_sample: true, sampling: SamplingArgs::default() };
        assert_eq!(args.option_string(), " --no-sample");
    }
}
