//! What is known of a run: from its folder, its text, and our libraries.

use std::path::{Path, PathBuf};

use candle_distributed::{
    batch::{Batch, PaddingReport},
    plan::{
        ParameterInfo, ShardingPlan,
        cost::{CostModel, PlanCost},
    },
    train::Checkpoints,
    types::WorldSize,
};

use crate::{
    commands::plan::model,
    error::{Error, Result},
    hint,
    train::{
        corpus::Corpus,
        data::Schedule,
        metrics::Metrics,
        run_dir::{self, Session, Settings},
        sharding::{self, Needs},
        trainer,
    },
};

/// A run.
pub(super) struct Facts {
    pub(super) path: PathBuf,
    pub(super) settings: Settings,
    pub(super) metrics: Metrics,
    pub(super) is_complete: bool,
    /// After how many steps the checkpoints were written that are there.
    pub(super) checkpoints: Vec<u64>,
    /// Unless the run is of an earlier version, which did not tell on how many devices it ran.
    pub(super) sharding: Option<Sharding>,
    /// What is read, or why that cannot be known any more.
    pub(super) reading: Result<Reading, String>,
}

/// The model in shards.
pub(super) struct Sharding {
    pub(super) parameters: Vec<ParameterInfo>,
    pub(super) plan: ShardingPlan,
    pub(super) cost: PlanCost,
    pub(super) needs: Needs,
}

/// The text, and the batches of the first epoch.
pub(super) struct Reading {
    pub(super) lengths: Vec<u64>,
    pub(super) batches: Vec<Batch>,
    pub(super) report: PaddingReport,
}

impl Facts {
    /// Those of the run in the folder `path`.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let settings = Settings::read(path)?.ok_or_else(|| {
            let no_run = Error::Usage(format!("{} does not hold a run", path.display()));
            no_run.hinted(hint::RUN)
        })?;
        let is_complete = run_dir::is_complete(path)?;
        Ok(Self {
            metrics: run_dir::metrics(path)?,
            checkpoints: Checkpoints::new(run_dir::checkpoints(path)).steps().unwrap_or_default(),
            sharding: Sharding::of(path, &settings, is_complete)?,
            reading: Reading::of(&settings)?,
            path: path.into(),
            settings,
            is_complete,
        })
    }

    /// Where the run is, or was last.
    pub(super) fn session(&self) -> Option<&Session> {
        self.settings.sessions.last()
    }

    /// How many steps are done.
    pub(super) fn done(&self) -> u64 {
        self.metrics.steps().last().map_or(0, |step| step.step + 1)
    }
}

impl Sharding {
    fn of(path: &Path, settings: &Settings, is_complete: bool) -> Result<Option<Self>> {
        let parameters = match settings.model {
            _ if is_complete => model::read(path)?,
            // Sizes from a file may be any; this is the one model that `train` has.
            Some(config) if config == trainer::MODEL => sharding::parameters_of(config)?,
            _ => return Ok(None),
        };
        let Some(session) = settings.sessions.last() else { return Ok(None) };
        let world_size = WorldSize::new(session.world_size)?;
        let plan = sharding::plan(&parameters, world_size)?;
        let cost = plan.cost(&CostModel::default())?;
        let needs = Needs::of(&parameters, &cost)?;
        Ok(Some(Self { parameters, plan, cost, needs }))
    }
}

impl Reading {
    /// The batches of a run, if its text is there and the same as ever.
    fn of(settings: &Settings) -> Result<Result<Self, String>> {
        let (name, corpus) = match &settings.data {
            None => (String::from("the text in this program"), Ok(Corpus::embedded())),
            Some(path) => (format!("the text in {}", path.display()), Corpus::read(path)),
        };
        let corpus = match corpus {
            Ok(corpus) if corpus.fingerprint() == settings.text => corpus,
            Ok(_) => {
                return Ok(Err(format!(
                    "{name} is not the one that the run learns from: it has changed since"
                )));
            }
            Err(error) => {
                return Ok(Err(format!("{name} is not there any more: {}", error.chain())));
            }
        };
        let schedule = Schedule::of(settings, &corpus)?;
        let (report, batches) = schedule.first_epoch()?;
        Ok(Ok(Self { lengths: corpus.lengths(), batches, report }))
    }
}
