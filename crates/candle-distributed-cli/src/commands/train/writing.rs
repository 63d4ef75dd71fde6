//! The text that the model of a run writes at the end.

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

/// The most new tokens, as many as are read at a glance, of a model with words and of one with bytes.
const MOST_TOKENS: usize = 64;
const MOST_BYTES: usize = 320;

/// The prompt of the text, and the sampling.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct WritingArgs {
    /// Let the model write on from this text at the end, as `generate` does with the folder of the run
    /// [default: the beginning of the first text]
    #[arg(long, value_name = "TEXT", conflicts_with = "dry_run")]
    prompt: Option<String>,
    /// Let the model write nothing at the end: the first process would read it back whole and in
    /// single precision
    #[arg(long, conflicts_with_all = ["prompt", "dry_run"])]
    no_sample: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
}

impl WritingArgs {
    /// Returns the options to type again, each with a space before it.
    pub(super) fn typed(&self) -> String {
        let prompt = self.prompt.as_ref();
        let prompt = prompt.map(|prompt| format!(" --prompt {}", hint::in_shell(prompt)));
        let no_sample = self.no_sample.then(|| " --no-sample".to_owned());
        [prompt, self.sampling.typed(), no_sample].into_iter().flatten().collect()
    }

    /// Rejects an invalid prompt before the model is trained.
    pub(super) fn check(&self, run: &PreparedRun) -> Result<()> {
        let Some(prompt) = &self.prompt else { return Ok(()) };
        self.sampling.generation(run.spec.seed).check().map_err(finetune::Error::from)?;
        let context = run.folder.llama().config().max_position_embeddings;
        Prompt::Text(prompt).ids(run.folder.tokenizer(), context)?;
        Ok(())
    }

    /// Returns the prompt, or `None` without a text at the end.
    pub(super) fn prompt(&self, run: &PreparedRun) -> Result<Option<String>> {
        /// Enough to show the kind of text.
        const N_TOKENS: usize = 16;
        if self.no_sample {
            return Ok(None);
        }
        if let Some(prompt) = &self.prompt {
            return Ok(Some(prompt.clone()));
        }
        let first: Vec<u32> = run.examples().ids(0).iter().take(N_TOKENS).copied().collect();
        let first = run.folder.tokenizer().decode(&first, false)?;
        // The last token may end within a character.
        let whole = first.trim_end_matches(char::REPLACEMENT_CHARACTER);
        Ok((!whole.is_empty()).then(|| whole.to_owned()))
    }

    /// Prints a text of the model of the ended run in `path`, and saves it for the report. The run is
    /// complete even if this fails.
    pub(super) fn write(&self, path: &Path, prompt: &str, settings: &Spec) -> Result<()> {
        match self.written(path, prompt, settings) {
            Ok(text) => output::text(|out| writeln!(out, "the model writes:\n{text}")),
            Err(error) => {
                output::warning(format_args!("the model writes nothing: {}", error.chain()));
                Ok(())
            }
        }
    }

    fn written(&self, path: &Path, prompt: &str, settings: &Spec) -> Result<String> {
        let generator = open_generator(path, None)?;
        let most = if settings.finetune.folder.is_some() { MOST_TOKENS } else { MOST_BYTES };
        let options = self.sampling.generation(settings.seed).with_max_tokens(most);
        let text = generator.generate(Prompt::Text(prompt), &options)?.text;
        output::file(&sample_in(path), text.as_bytes())?;
        Ok(text)
    }
}

/// Warns that the model is too large to be read back for a text.
pub(super) fn say_too_large(bytes: u64) {
    output::warning(format_args!(
        "the model writes nothing: whole, it would take about {}, more than this process was to \
         take for the run",
        HumanBytes(bytes.into())
    ));
    output::hint(hint::WRITE_LATER);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_writes_nothing_is_resumed_to_write_nothing() {
        let nothing =
            WritingArgs { prompt: None, no_sample: true, sampling: SamplingArgs::default() };
        assert_eq!(nothing.typed(), " --no-sample");
    }
}
