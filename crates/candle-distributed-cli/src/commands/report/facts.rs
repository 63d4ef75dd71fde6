//! What is known about a run, from its folder, its text and the libraries.

use std::path::{Path, PathBuf};

use candle_distributed::{
    batch::{Batch, PaddingReport},
    finetune::{
        cost::{ModelBytes, Workload, cost_model, plan},
        run::{self, ValidationPoint, validations},
        spec::{Session, Spec},
        support,
    },
    plan::{ParameterInfo, ShardingPlan, cost::PlanCost},
    train::Metrics,
    types::{Seed, WorldSize},
};

use crate::{
    error::{Error, Result},
    hint,
    train::measured::{self, Comparison},
};

/// A run.
pub(super) struct Facts {
    pub(super) path: PathBuf,
    pub(super) settings: Spec,
    pub(super) metrics: Metrics,
    pub(super) is_complete: bool,
    /// The steps after which the checkpoints were written that are still there.
    pub(super) checkpoints: Vec<u64>,
    pub(super) sharding: Sharding,
    /// What the run reads, or why that is no longer known.
    pub(super) reading: Result<Reading, String>,
    /// What was predicted of the latest session, and what was measured; `None` if either is not
    /// known.
    pub(super) comparison: Option<Comparison>,
    /// What validations have found, if there were some.
    pub(super) held_out: Vec<ValidationPoint>,
    /// A text that the model wrote, if the run has one.
    pub(super) sample: Option<String>,
}

/// The model in shards.
pub(super) struct Sharding {
    pub(super) parameters: Vec<ParameterInfo>,
    pub(super) plan: ShardingPlan,
    pub(super) cost: PlanCost,
    pub(super) needs: ModelBytes,
}

/// The text, and the batches of the first epoch.
pub(super) struct Reading {
    pub(super) lengths: Vec<u64>,
    /// The batches of each step.
    pub(super) steps: Vec<Vec<Batch>>,
    /// All of them, one after the other.
    pub(super) batches: Vec<Batch>,
    pub(super) report: PaddingReport,
}

impl Facts {
    /// The facts of the run in the folder `path`.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let settings = Spec::read(path)?.ok_or_else(|| {
            let no_run = Error::usage(format!("{} does not hold a run", path.display()));
            no_run.hinted(hint::RUN)
        })?;
        let is_complete = run::is_complete(path, &settings)?;
        let sharding = Sharding::of(&settings)?;
        let reading = Reading::of(&settings)?;
        Ok(Self {
            metrics: run::metrics(path)?,
            checkpoints: run::checkpoints(path, &settings).steps()?,
            comparison: comparison(&settings, &sharding, reading.as_ref().ok())?,
            held_out: validations(path, settings.steps)?,
            sample: sample(path)?,
            sharding,
            reading,
            path: path.into(),
            settings,
            is_complete,
        })
    }

    /// The latest session of the run.
    pub(super) fn session(&self) -> &Session {
        self.settings.session()
    }

    /// The number of steps that are done.
    pub(super) fn done(&self) -> u64 {
        self.metrics.done()
    }
}

/// What the model wrote, its beginning if that is long. Characters that no page may have are
/// escaped.
fn sample(run: &Path) -> Result<Option<String>> {
    /// Some pages of a book.
    const MOST: usize = 10_000;

    let Some(bytes) = support::read_if_there(&run::sample_in(run))? else { return Ok(None) };
    let text = String::from_utf8_lossy(&bytes);
    let shown = |char: char| match char {
        '\n' | '\t' => char.to_string(),
        char if char.is_control() || matches!(char, '\u{fffe}' | '\u{ffff}') => {
            char.escape_default().to_string()
        }
        char => char.to_string(),
    };
    let mut written: String = text.chars().take(MOST).map(shown).collect();
    if text.chars().nth(MOST).is_some() {
        written.push('…');
    }
    Ok(Some(written))
}

fn comparison(
    settings: &Spec,
    sharding: &Sharding,
    reading: Option<&Reading>,
) -> Result<Option<Comparison>> {
    let session = settings.session();
    let (Some(reading), Some(counted), Some(base_bytes)) =
        (reading, session.step_traffic, session.base_bytes)
    else {
        return Ok(None);
    };
    let work = Workload {
        check: false,
        sizes: settings.trained_model()?.sizes(),
        precision: settings.recipe.precision(),
        parameters: &sharding.parameters,
        sharding: session.sharding.as_ref(),
        steps: &reading.steps,
        is_packed: settings.is_packed(),
        world_size: session.world_size,
        // A file may say anything.
        ranks: (0, session.devices_here.min(session.world_size)),
        base_bytes,
    };
    Ok(Some(Comparison {
        memory: work.predict()?,
        peak_bytes: session.peak_bytes,
        on_processors: session.on_processors,
        planned: measured::planned(&work)?,
        counted,
    }))
}

impl Sharding {
    fn of(settings: &Spec) -> Result<Self> {
        let parameters = settings.trained_model()?.parameters()?;
        let session = settings.session();
        let world_size = WorldSize::new(session.world_size)?;
        let plan = plan(session.sharding.as_ref(), &parameters, world_size)?;
        let cost =
            plan.cost(&cost_model(session.sharding.as_ref(), settings.recipe.precision()))?;
        let needs = ModelBytes::new(&parameters, &cost, session.sharding.is_some())?;
        Ok(Self { parameters, plan, cost, needs })
    }
}

impl Reading {
    /// The batches of a run, if its text is still there and unchanged.
    fn of(settings: &Spec) -> Result<Result<Self, String>> {
        let name = match &settings.data {
            None => String::from("the stories of this program"),
            Some(path) => format!("the text in {}", path.display()),
        };
        let lengths = match fingerprint_and_lengths(settings) {
            Ok((fingerprint, lengths)) if fingerprint == settings.text => lengths,
            Ok(_) => {
                return Ok(Err(format!(
                    "{name} does not match the fingerprint of the run: it has changed since"
                )));
            }
            Err(error) => {
                return Ok(Err(format!("{name} can no longer be read: {}", error.chain())));
            }
        };
        let (report, steps) = settings.schedule(lengths.clone())?.first_epoch()?;
        Ok(Ok(Self { lengths, batches: steps.concat(), steps, report }))
    }
}

/// Returns the fingerprint of what a run learns from, and the lengths of its sequences.
fn fingerprint_and_lengths(settings: &Spec) -> Result<(String, Vec<u64>)> {
    let Spec { finetune, data, seed, .. } = settings;
    let folder = finetune.open_folder()?;
    let (fingerprint, examples, _) =
        finetune.examples(&folder, data.as_deref(), Seed::new(*seed))?;
    Ok((fingerprint, examples.lengths()))
}
