//! What `train` prints before the first step: warnings about the texts, and the plan of the run.

use std::{
    io::{self, Write},
    path::Path,
};

use candle_distributed::{
    finetune::{
        Examples, Overlong, PreparedRun,
        spec::{MixtureWeights, Spec},
    },
    plan::report::PlanReport,
    types::human::HumanCount,
};

use crate::{devices::ProcessPlace, error::Result, output, strategy};

/// Prints that a run has no steps left.
pub(super) fn print_complete(process: ProcessPlace, path: &Path) -> Result<()> {
    process.print(|out| writeln!(out, "the run in {} is complete", path.display()))
}

/// Warns if texts longer than the context are truncated or left out.
pub(super) fn warn_of_overlong(run: &PreparedRun) {
    let n_overlong = run.examples().n_overlong();
    let treatment = match run.spec.finetune.overlong {
        Overlong::Truncate => "truncated",
        Overlong::Skip => "left out",
        // No token is lost.
        _ => return,
    };
    if n_overlong > 0 {
        let verb = if n_overlong == 1 { "is" } else { "are" };
        output::warning(format_args!(
            "{} {verb} longer than the context ({} tokens) and {verb} {treatment}",
            HumanCount(n_overlong.into()).with_noun("text"),
            run.spec.finetune.context,
        ));
    }
}

/// Warns of skipped files, and of text files beside `.jsonl` files, which may not be training data.
pub(super) fn warn_of_files(examples: &Examples) {
    let counts = examples.files();
    if counts.skipped > 0 {
        let files = HumanCount(counts.skipped.into()).with_noun("file");
        output::warning(format_args!("{files} of --data cannot be read as UTF-8: skipped"));
    }
    if counts.n_with_line_examples > 0 && counts.n_with_paragraph_examples > 0 {
        let files = HumanCount(counts.n_with_paragraph_examples.into()).with_noun("file");
        output::warning(format_args!(
            "--data has {files} of plain text beside .jsonl files: each paragraph is an example"
        ));
    }
}

/// Writes the texts of a mixture with their weights, and where these begin.
pub(super) fn write_mixture(spec: &Spec, out: &mut dyn Write) -> io::Result<()> {
    for &MixtureWeights { from_epoch, from_step, .. } in &spec.finetune.mixture {
        let texts = spec.texts(from_epoch, from_step).into_iter().map(|text| text.to_string());
        let texts: Vec<String> = texts.collect();
        let step = if from_step == 0 { String::new() } else { format!(", step {from_step}") };
        writeln!(out, "texts from epoch {from_epoch}{step} on: {}", texts.join(", "))?;
    }
    Ok(())
}

/// Prints the first step of a resumed run, the plan of a sharded run, and the batches of an epoch.
pub(super) fn announce(run: &PreparedRun) -> Result<()> {
    let first_epoch = run.first_epoch_padding()?;
    let n_done = run.first_step();
    let plan = run.plan()?;
    let sharded = match &run.sharding {
        Some(sharding) => Some((
            PlanReport::new(&plan.plan, &plan.cost_model, None)?,
            sharding.strategy.matches(&plan.parameters),
        )),
        None => None,
    };
    output::to_stdout(|out| {
        if n_done > 0 {
            writeln!(out, "resuming after step {n_done} of {}", run.spec.steps)?;
        }
        write_mixture(&run.spec, out)?;
        if let Some((report, rules)) = &sharded {
            writeln!(out, "{report}")?;
            rules.iter().try_for_each(|rules| strategy::write_matches(rules, out))?;
        }
        writeln!(out, "each epoch: {first_epoch}")
    })
}
