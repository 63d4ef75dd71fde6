//! Which rank this process is, as told by what started it.

use std::{env, ffi::OsString, fmt};

use crate::rank::{Error, Placement, Rank, Result, WorldSize};

/// The largest id of a step that `srun` started; those above name batch scripts, shells of `salloc`
/// and the like.
const SLURM_MAX_NORMAL_STEP_ID: u64 = 0xffff_fff0;

const WHOLE_NUMBER: &str = "a whole number of at most 64 bits";
const TASKS_PER_NODE: &str = "tasks per node, such as 2(x3),1";

/// What started a process and told it its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum Launcher {
    /// An agent of `torchrun` (torch elastic), which sets `TORCHELASTIC_RUN_ID` beside `RANK` and
    /// `WORLD_SIZE`.
    Torchrun,
    /// Something else that sets `RANK` and `WORLD_SIZE`, as PyTorch's `env://` reads them: a
    /// script, Kubernetes.
    TorchEnv,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// A launcher that speaks PMI: Hydra of MPICH, Intel MPI, or `srun --mpi=pmi2`.
    Pmi,
    /// `srun` of Slurm.
    Slurm,
}

impl Launcher {
    /// The variables by which it names a rank and the size of its world.
    pub(crate) fn variables(self) -> &'static str {
        match self {
            Self::Torchrun | Self::TorchEnv => "RANK, WORLD_SIZE",
            Self::OpenMpi => "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE",
            Self::Pmi => "PMI_RANK, PMI_SIZE",
            Self::Slurm => "SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS",
        }
    }

    /// Whether `outer` commonly starts what then starts the ranks.
    ///
    /// `srun` or `mpirun` starts an agent of torchrun on each node; `mpirun` starts its daemons by
    /// `srun`, and its ranks inherit the daemon's variables (Open MPI #3999, #8424). What people
    /// set by hand is inside nothing.
    fn runs_inside(self, outer: Self) -> bool {
        match self {
            Self::Torchrun => matches!(outer, Self::OpenMpi | Self::Pmi | Self::Slurm),
            Self::OpenMpi | Self::Pmi => outer == Self::Slurm,
            Self::TorchEnv | Self::Slurm => false,
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun",
            Self::TorchEnv => "env://",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI",
            Self::Slurm => "Slurm",
        })
    }
}

/// A process that a launcher started as one of several: its placement, and what it knows of its own
/// machine.
///
/// # Examples
///
/// ```
/// use core_types::{Launched, Launcher, Placement};
///
/// let vars = |name: &str| {
///     let value = match name {
///         "OMPI_COMM_WORLD_RANK" => "5",
///         "OMPI_COMM_WORLD_SIZE" => "8",
///         "OMPI_COMM_WORLD_LOCAL_RANK" => "1",
///         _ => return None,
///     };
///     Some(value.to_owned())
/// };
/// let launched = Launched::from_vars(vars)?.expect("Open MPI's variables are there");
/// assert_eq!(launched.placement(), Placement::new(5, 8)?);
/// assert_eq!(launched.launcher(), Launcher::OpenMpi);
/// assert_eq!(launched.local_rank().map(|rank| rank.as_usize()), Some(1)); // the GPU to take
/// assert_eq!(launched.local_world_size(), None);
/// # Ok::<(), core_types::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Unchecked", into = "Unchecked"))]
pub struct Launched {
    placement: Placement,
    launcher: Launcher,
    local_rank: Option<Rank>,
    local_world_size: Option<WorldSize>,
}

impl Launched {
    /// Returns which rank the environment says this process is, or `None` if no launcher has set
    /// anything.
    ///
    /// For programs, at their start: a library takes a [`Placement`], so that equal arguments give
    /// equal results. Where there is `None` a program is alone, `Placement::SINGLE`.
    ///
    /// # Variables
    ///
    /// The launchers name rank and size in variables of their own:
    ///
    /// | launcher | rank, size | on this machine: rank, size |
    /// |---|---|---|
    /// | [torchrun], `env://` | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
    /// | [Open MPI] | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `OMPI_COMM_WORLD_LOCAL_SIZE` |
    /// | MPICH's [Hydra], Intel MPI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
    /// | [Slurm], in a step of `srun` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or else `SLURM_NTASKS` | `SLURM_LOCALID`, the entry of `SLURM_STEP_TASKS_PER_NODE` at `SLURM_NODEID` |
    ///
    /// Slurm's are believed inside a step alone: a batch script and a shell of `salloc` see the
    /// job's variables too, with a `SLURM_PROCID` of 0 and the size of a world that nobody has
    /// started. `SLURM_STEP_ID` is absent there, or one of the ids above `SLURM_MAX_NORMAL_STEP_ID`
    /// (`slurm.h`); 4294967290 is the shell of `salloc`, which is a step by `use_interactive_step`.
    /// The step's own count comes first because `srun --preserve-env` leaves the job's in
    /// `SLURM_NTASKS`. `SLURM_NTASKS_PER_NODE` is not read: it is what was asked for, an upper
    /// bound on what a node got.
    ///
    /// `MASTER_ADDR` and `MASTER_PORT` say where the others can be met, not who this one is, and
    /// are not read either.
    ///
    /// # Several launchers
    ///
    /// If all that are complete name the same rank and size, the innermost is reported: torchrun or
    /// `env://`, Open MPI, PMI, Slurm. What it does not say about its machine is taken from the
    /// next that agrees. If they contradict each other the innermost is believed only where one
    /// commonly starts the other: torchrun (which `TORCHELASTIC_RUN_ID` tells from variables set by
    /// hand) inside MPI or Slurm, and MPI inside Slurm. Then the inner world must be at least as
    /// large as the outer, since each outer task starts a rank or more. A smaller one was inherited
    /// from somewhere else, or each task has started a world of its own, and both are errors.
    ///
    /// Half a pair is an error too, unless a complete launcher says the same: scripts that export
    /// `WORLD_SIZE` alone and take the rank from Slurm are common.
    ///
    /// # Errors
    ///
    /// - [`Error::VariableNotUnicode`], [`Error::VariableUnreadable`] if a value is not what it
    ///   should be. An empty one is not: `RANK=$UNSET` must not make every process the only one.
    /// - [`Error::VariableMissing`] if there is a rank without a size, a size without a rank, or a
    ///   local rank or size without both.
    /// - [`Error::SizeVariableOutOfRange`], [`Error::RankVariableOutOfRange`] if there is no such
    ///   world, or no such rank in it; the same for the part of it on this machine.
    /// - [`Error::LaunchersDisagree`] if they contradict each other in any other way than those
    ///   above.
    ///
    /// # Examples
    ///
    /// ```
    /// use core_types::{Launched, Placement};
    ///
    /// let place = Launched::from_env()?.map_or(Placement::SINGLE, |launched| launched.placement());
    /// println!("{place}");
    /// # Ok::<(), core_types::Error>(())
    /// ```
    ///
    /// # References
    ///
    /// The variables are those of the launchers' manuals: [torchrun], [Open MPI], [Hydra] and Intel
    /// MPI, [Slurm]. Unlike PyTorch's `env://` and JAX's cluster detection, nothing is guessed when
    /// a part of them is absent.
    ///
    /// [torchrun]: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    /// [Open MPI]: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
    /// [Hydra]:
    /// https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
    /// [Slurm]: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    pub fn from_env() -> Result<Option<Self>> {
        from_lookup(&|name| env::var_os(name))
    }

    /// Returns what [`Launched::from_env`] would if `lookup` were the environment.
    ///
    /// # Errors
    ///
    /// Those of [`Launched::from_env`].
    pub fn from_vars(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        from_lookup(&|name| lookup(name).map(OsString::from))
    }

    /// Which rank this process is, and of how many.
    pub fn placement(self) -> Placement {
        self.placement
    }

    /// What said so; the innermost if several did.
    pub fn launcher(self) -> Launcher {
        self.launcher
    }

    /// The number of this process among those on its machine, if a launcher said: the device to
    /// take.
    pub fn local_rank(self) -> Option<Rank> {
        self.local_rank
    }

    /// The number of this world's processes on this machine, if a launcher said.
    pub fn local_world_size(self) -> Option<WorldSize> {
        self.local_world_size
    }

    /// Whether a contradiction with `outer` is explained by `outer` having started what started
    /// this one.
    fn runs_inside(&self, outer: &Self) -> bool {
        self.launcher.runs_inside(outer.launcher)
            && self.placement.world_size() >= outer.placement.world_size()
    }
}

/// The whole decision, as a function of what `lookup` finds.
fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Option<Launched>> {
    let vars = Vars(lookup);
    let mut claims = vec![Claim::torch(&vars)?, Claim::open_mpi(&vars)?, Claim::pmi(&vars)?];
    claims.extend(Claim::slurm(&vars)?);
    let mut complete = Vec::with_capacity(claims.len());
    for claim in &claims {
        complete.extend(claim.complete()?);
    }
    let launched = innermost(&complete)?;
    match claims.iter().find_map(|claim| claim.half_beside(launched)) {
        Some(error) => Err(error),
        None => Ok(launched),
    }
}

/// The first of `all`, which stand from the inside out, if the others agree with it or are around
/// it.
fn innermost(all: &[Launched]) -> Result<Option<Launched>> {
    let Some(&first) = all.first() else { return Ok(None) };
    let agree = || all.iter().filter(|one| one.placement == first.placement);
    for other in all {
        // Any that agrees may be the one inside `other`: RANK set from Open MPI's rank, under
        // Slurm's daemons.
        if other.placement != first.placement && !agree().any(|one| one.runs_inside(other)) {
            return Err(Error::LaunchersDisagree {
                launcher: first.launcher,
                place: first.placement,
                other_launcher: other.launcher,
                other_place: other.placement,
            });
        }
    }
    // Rank and size on a machine belong together, so both are those of one launcher.
    let knows = agree().find(|one| one.local_rank.is_some());
    let local =
        knows.or_else(|| agree().find(|one| one.local_world_size.is_some())).unwrap_or(&first);
    Ok(Some(Launched {
        local_rank: local.local_rank,
        local_world_size: local.local_world_size,
        ..first
    }))
}

/// Variables, read by name.
struct Vars<'a>(&'a dyn Fn(&str) -> Option<OsString>);

impl Vars<'_> {
    fn text(&self, name: &'static str) -> Result<Option<String>> {
        let text = (self.0)(name).map(OsString::into_string).transpose();
        text.map_err(|value| Error::VariableNotUnicode { name, value })
    }

    fn number(&self, name: &'static str) -> Result<Option<Number>> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        match parse(&text) {
            Some(value) => Ok(Some(Number { name, value })),
            None => Err(Error::VariableUnreadable { name, value: text, expected: WHOLE_NUMBER }),
        }
    }
}

/// A number and the variable it stands in.
#[derive(Clone, Copy)]
struct Number {
    name: &'static str,
    value: u64,
}

impl Number {
    fn size(self, max: WorldSize) -> Result<WorldSize> {
        let Self { name, value } = self;
        let size = WorldSize::new(value).ok().filter(|&size| size <= max);
        size.ok_or(Error::SizeVariableOutOfRange { name, value, max })
    }

    fn rank_below(self, size: Self) -> Result<Rank> {
        if self.value < size.value {
            return Ok(Rank::in_world(self.value));
        }
        let (name, rank) = (self.name, self.value);
        Err(Error::RankVariableOutOfRange { name, rank, size_name: size.name, size: size.value })
    }
}

/// What one launcher's variables say, some of which may be absent.
struct Claim {
    launcher: Launcher,
    rank: Option<Number>,
    size: Option<Number>,
    local_rank: Option<Number>,
    local_size: Option<Number>,
    rank_name: &'static str,
    size_name: &'static str,
}

impl Claim {
    /// The claim of `launcher`, whose variables are called rank, size, local rank and local size in
    /// this order.
    fn read(vars: &Vars<'_>, launcher: Launcher, names: [&'static str; 4]) -> Result<Self> {
        let [rank_name, size_name, local_rank, local_size] = names;
        Ok(Self {
            launcher,
            rank: vars.number(rank_name)?,
            size: vars.number(size_name)?,
            local_rank: vars.number(local_rank)?,
            local_size: vars.number(local_size)?,
            rank_name,
            size_name,
        })
    }

    fn torch(vars: &Vars<'_>) -> Result<Self> {
        let by_agent = vars.text("TORCHELASTIC_RUN_ID")?.is_some();
        let launcher = if by_agent { Launcher::Torchrun } else { Launcher::TorchEnv };
        Self::read(vars, launcher, ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
    }

    fn open_mpi(vars: &Vars<'_>) -> Result<Self> {
        let names = [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ];
        Self::read(vars, Launcher::OpenMpi, names)
    }

    fn pmi(vars: &Vars<'_>) -> Result<Self> {
        Self::read(
            vars,
            Launcher::Pmi,
            ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
        )
    }

    /// Nothing outside a step, whatever the variables say.
    fn slurm(vars: &Vars<'_>) -> Result<Option<Self>> {
        if !in_slurm_step(vars)? {
            return Ok(None);
        }
        let (rank_name, size_name) = ("SLURM_PROCID", "SLURM_NTASKS");
        let size = match vars.number("SLURM_STEP_NUM_TASKS")? {
            Some(size) => Some(size),
            None => vars.number(size_name)?,
        };
        let (rank, local_rank) = (vars.number(rank_name)?, vars.number("SLURM_LOCALID")?);
        let (launcher, local_size) = (Launcher::Slurm, slurm_local_size(vars)?);
        Ok(Some(Self { launcher, rank, size, local_rank, local_size, rank_name, size_name }))
    }

    /// What it says, checked, if rank and size are both there.
    fn complete(&self) -> Result<Option<Launched>> {
        let (Some(rank), Some(size)) = (self.rank, self.size) else { return Ok(None) };
        let world_size = size.size(WorldSize::MAX)?;
        let placement = Placement::new(rank.rank_below(size)?.as_u64(), world_size.as_u64())?;
        let local_world_size = self.local_size.map(|local| local.size(world_size)).transpose()?;
        let local_rank = self
            .local_rank
            .map(|local| local.rank_below(self.local_size.unwrap_or(size)))
            .transpose()?;
        Ok(Some(Launched { placement, launcher: self.launcher, local_rank, local_world_size }))
    }

    /// What is wrong with its being incomplete, if it is, and if `launched` does not say the same.
    fn half_beside(&self, launched: Option<Launched>) -> Option<Error> {
        let (found, missing) = match (self.rank, self.size) {
            (Some(_), Some(_)) => return None,
            (Some(rank), None) => (rank, self.size_name),
            (None, Some(size)) => (size, self.rank_name),
            (None, None) => (self.local_rank.or(self.local_size)?, self.rank_name),
        };
        let same = launched.is_some_and(|Launched { placement, .. }| {
            self.rank.is_none_or(|rank| rank.value == placement.rank().as_u64())
                && self.size.is_none_or(|size| size.value == placement.world_size().as_u64())
        });
        (!same).then_some(Error::VariableMissing {
            name: missing,
            found: found.name,
            value: found.value,
        })
    }
}

/// Whether `srun` started this process, or something around it.
fn in_slurm_step(vars: &Vars<'_>) -> Result<bool> {
    let name = "SLURM_STEP_ID";
    match vars.text(name)?.as_deref() {
        // `sacct` calls the special steps by these names, and some sites set them.
        None | Some("batch" | "extern" | "interactive") => Ok(false),
        Some(_) => Ok(vars.number(name)?.is_some_and(|id| id.value <= SLURM_MAX_NORMAL_STEP_ID)),
    }
}

/// How many tasks of this step are on this node.
fn slurm_local_size(vars: &Vars<'_>) -> Result<Option<Number>> {
    let name = "SLURM_STEP_TASKS_PER_NODE";
    // The nodes of a heterogeneous job are counted over all of its components, and the list is of
    // one.
    if vars.text("SLURM_HET_SIZE")?.is_some() {
        return Ok(None);
    }
    let (Some(node), Some(text)) = (vars.number("SLURM_NODEID")?, vars.text(name)?) else {
        return Ok(None);
    };
    let Some(runs) = runs_of_nodes(&text) else {
        return Err(Error::VariableUnreadable { name, value: text, expected: TASKS_PER_NODE });
    };
    let run = runs.into_iter().find(|&(_, end)| node.value < end);
    Ok(run.map(|(value, _)| Number { name, value }))
}

/// A list like `2(x3),1`, which stands for 2, 2, 2, 1, as numbers of tasks, each with the first
/// node after it.
fn runs_of_nodes(list: &str) -> Option<Vec<(u64, u64)>> {
    let mut end = 0_u64;
    let run = |entry: &str| {
        let (tasks, times) = match entry.split_once("(x") {
            Some((tasks, times)) => (tasks, parse(times.strip_suffix(')')?)?),
            None => (entry, 1),
        };
        end = end.checked_add(times)?;
        Some((parse(tasks)?, end))
    };
    list.split(',').map(run).collect()
}

/// Digits alone: what Rust reads as a number beside them, `+3`, no launcher writes.
fn parse(text: &str) -> Option<u64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

/// What a [`Launched`] looks like before it is checked.
#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
struct Unchecked {
    placement: Placement,
    launcher: Launcher,
    local_rank: Option<Rank>,
    local_world_size: Option<WorldSize>,
}

#[cfg(feature = "serde")]
impl TryFrom<Unchecked> for Launched {
    type Error = Error;

    fn try_from(unchecked: Unchecked) -> Result<Self> {
        let Unchecked { placement, launcher, local_rank, local_world_size } = unchecked;
        // The last rank of this machine is one of the world.
        if let Some(size) = local_world_size {
            Placement::new(size.as_u64() - 1, placement.world_size().as_u64())?;
        }
        if let Some(rank) = local_rank {
            Placement::new(
                rank.as_u64(),
                local_world_size.unwrap_or(placement.world_size()).as_u64(),
            )?;
        }
        Ok(Self { placement, launcher, local_rank, local_world_size })
    }
}

#[cfg(feature = "serde")]
impl From<Launched> for Unchecked {
    fn from(launched: Launched) -> Self {
        let Launched { placement, launcher, local_rank, local_world_size } = launched;
        Self { placement, launcher, local_rank, local_world_size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What variables, given as in a shell, come to.
    fn outcome(vars: &str) -> Result<Option<Launched>> {
        let find = |name: &str| {
            let mut pairs = vars.split_whitespace().filter_map(|pair| pair.split_once('='));
            pairs.find(|pair| pair.0 == name).map(|pair| pair.1.to_owned())
        };
        Launched::from_vars(find)
    }

    /// The outcome as one line: `torchrun: 3 of 8, local 1 of 2`, `alone`, or the error's words.
    fn words(vars: &str) -> String {
        let launched = match outcome(vars) {
            Ok(Some(launched)) => launched,
            Ok(None) => return "alone".to_owned(),
            Err(error) => return error.to_string(),
        };
        let Launched { placement, launcher, local_rank, local_world_size } = launched;
        let local = match (local_rank, local_world_size) {
            (Some(rank), Some(size)) => format!(", local {rank} of {size}"),
            (Some(rank), None) => format!(", local {rank}"),
            (None, Some(size)) => format!(", local of {size}"),
            (None, None) => String::new(),
        };
        format!("{launcher}: {} of {}{local}", placement.rank(), placement.world_size())
    }

    fn check(table: &[(&str, &str)]) {
        for (vars, expected) in table {
            assert_eq!(words(vars), *expected, "{vars}");
        }
    }

    #[test]
    fn without_a_launcher_a_process_is_alone() {
        check(&[
            ("", "alone"),
            ("HOME=/root MASTER_ADDR=node1 MASTER_PORT=29500", "alone"),
            ("TORCHELASTIC_RUN_ID=none", "alone"),
            ("SLURM_NTASKS=8 SLURM_JOB_ID=7", "alone"),
        ]);
    }

    #[test]
    fn one_launcher_is_believed() {
        check(&[
            (
                "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x",
                "torchrun: 3 of 8, local 1 of 2",
            ),
            ("RANK=3 WORLD_SIZE=8", "env://: 3 of 8"),
            ("RANK=0 WORLD_SIZE=1", "env://: 0 of 1"),
            ("RANK=03 WORLD_SIZE=8", "env://: 3 of 8"),
            ("RANK=3 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4", "env://: 3 of 8, local of 4"),
            ("RANK=1048575 WORLD_SIZE=1048576", "env://: 1048575 of 1048576"),
            (
                "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4",
                "Open MPI: 5 of 8, local 1 of 4",
            ),
            (
                "PMI_RANK=4 PMI_SIZE=5 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
                "PMI: 4 of 5, local 1 of 2",
            ),
            ("PMI_RANK=4 PMI_SIZE=5", "PMI: 4 of 5"),
            (
                "SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1",
                "Slurm: 5 of 8, local 1",
            ),
        ]);
    }

    #[test]
    fn slurm_is_believed_in_a_step_alone() {
        check(&[
            ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", "alone"),
            ("SLURM_STEP_ID=batch SLURM_PROCID=0 SLURM_NTASKS=8", "alone"),
            // The batch step, a shell of `salloc`, the first id that is not a step's, the last that
            // is.
            ("SLURM_STEP_ID=4294967291 SLURM_PROCID=0 SLURM_NTASKS=8", "alone"),
            (
                "SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1",
                "alone",
            ),
            ("SLURM_STEP_ID=4294967281 SLURM_PROCID=0 SLURM_NTASKS=8", "alone"),
            ("SLURM_STEP_ID=4294967280 SLURM_PROCID=0 SLURM_NTASKS=8", "Slurm: 0 of 8"),
            ("SLURM_PROCID=x SLURM_NTASKS=0", "alone"),
            ("SLURM_STEP_ID=2", "alone"),
            (
                "SLURM_STEP_ID=zero SLURM_PROCID=0 SLURM_NTASKS=8",
                "environment variable SLURM_STEP_ID is \"zero\", it must be a whole number of at most 64 bits",
            ),
        ]);
    }

    #[test]
    fn the_count_of_a_slurm_step_comes_before_that_of_its_job() {
        check(&[
            (
                "SLURM_STEP_ID=1 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=16",
                "Slurm: 3 of 4",
            ),
            ("SLURM_STEP_ID=1 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4", "Slurm: 3 of 4"),
        ]);
    }

    #[test]
    fn tasks_on_a_slurm_node_are_those_of_its_entry() {
        let step =
            "SLURM_STEP_ID=0 SLURM_PROCID=6 SLURM_NTASKS=7 SLURM_LOCALID=0 SLURM_NTASKS_PER_NODE=2";
        let unreadable = |list: &str| {
            format!(
                "environment variable SLURM_STEP_TASKS_PER_NODE is \"{list}\", it must be tasks per node, such as 2(x3),1"
            )
        };
        let on_node = |node: &str, list: &str| {
            words(&format!("{step} SLURM_NODEID={node} SLURM_STEP_TASKS_PER_NODE={list}"))
        };
        assert_eq!(on_node("3", "2(x3),1"), "Slurm: 6 of 7, local 0 of 1");
        assert_eq!(on_node("2", "2(x3),1"), "Slurm: 6 of 7, local 0 of 2");
        assert_eq!(on_node("0", "7"), "Slurm: 6 of 7, local 0 of 7");
        assert_eq!(on_node("9", "2(x3),1"), "Slurm: 6 of 7, local 0");
        assert_eq!(on_node("0 SLURM_HET_SIZE=2", "1"), "Slurm: 6 of 7, local 0");
        assert_eq!(words(step), "Slurm: 6 of 7, local 0");
        for list in ["2(x3", "2(3)", "x", "2,", "2(x)", "1(x18446744073709551615),1"] {
            assert_eq!(on_node("0", list), unreadable(list));
        }
    }

    #[test]
    fn half_a_pair_is_refused() {
        check(&[
            ("RANK=3", "environment variable RANK is 3 but WORLD_SIZE is not set"),
            ("WORLD_SIZE=8", "environment variable WORLD_SIZE is 8 but RANK is not set"),
            ("LOCAL_RANK=1", "environment variable LOCAL_RANK is 1 but RANK is not set"),
            (
                "LOCAL_WORLD_SIZE=2",
                "environment variable LOCAL_WORLD_SIZE is 2 but RANK is not set",
            ),
            (
                "OMPI_COMM_WORLD_SIZE=8",
                "environment variable OMPI_COMM_WORLD_SIZE is 8 but OMPI_COMM_WORLD_RANK is not set",
            ),
            ("PMI_RANK=0", "environment variable PMI_RANK is 0 but PMI_SIZE is not set"),
            (
                "MPI_LOCALRANKID=0",
                "environment variable MPI_LOCALRANKID is 0 but PMI_RANK is not set",
            ),
            (
                "SLURM_STEP_ID=0 SLURM_PROCID=1",
                "environment variable SLURM_PROCID is 1 but SLURM_NTASKS is not set",
            ),
            (
                "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2",
                "environment variable SLURM_STEP_NUM_TASKS is 2 but SLURM_PROCID is not set",
            ),
            ("RANK=1 PMI_SIZE=2", "environment variable RANK is 1 but WORLD_SIZE is not set"),
        ]);
    }

    #[test]
    fn half_a_pair_beside_a_launcher_that_says_the_same_is_fine() {
        let step = "SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1";
        let beside = |half: &str| words(&format!("{step} {half}"));
        assert_eq!(beside("WORLD_SIZE=8 MASTER_ADDR=node1"), "Slurm: 5 of 8, local 1");
        assert_eq!(beside("RANK=5"), "Slurm: 5 of 8, local 1");
        assert_eq!(beside("LOCAL_RANK=1"), "Slurm: 5 of 8, local 1");
        assert_eq!(beside("MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4"), "Slurm: 5 of 8, local 1");
        assert_eq!(
            beside("WORLD_SIZE=4"),
            "environment variable WORLD_SIZE is 4 but RANK is not set"
        );
        assert_eq!(beside("RANK=4"), "environment variable RANK is 4 but WORLD_SIZE is not set");
    }

    #[test]
    fn what_is_not_a_number_is_refused() {
        for value in ["", "abc", "-1", "+1", "1.0", "0x1", "18446744073709551616"] {
            for vars in [format!("RANK={value} WORLD_SIZE=2"), format!("RANK={value}")] {
                let expected = Error::VariableUnreadable {
                    name: "RANK",
                    value: value.into(),
                    expected: WHOLE_NUMBER,
                };
                assert_eq!(outcome(&vars), Err(expected));
            }
        }
        check(&[(
            "PMI_RANK=0 PMI_SIZE=two",
            "environment variable PMI_SIZE is \"two\", it must be a whole number of at most 64 bits",
        )]);
    }

    #[cfg(unix)]
    #[test]
    fn what_is_not_unicode_is_refused() {
        use std::os::unix::ffi::OsStringExt as _;

        let value = OsString::from_vec(vec![b'1', 0xff]);
        for name in ["RANK", "TORCHELASTIC_RUN_ID", "PMI_SIZE", "SLURM_STEP_ID"] {
            let error = from_lookup(&|wanted| (wanted == name).then(|| value.clone())).unwrap_err();
            assert_eq!(error, Error::VariableNotUnicode { name, value: value.clone() });
            assert_eq!(
                error.to_string(),
                format!("environment variable {name} is \"1\\xFF\", which is not Unicode")
            );
        }
    }

    #[test]
    fn ranks_and_sizes_outside_their_limits_are_refused() {
        check(&[
            (
                "RANK=4 WORLD_SIZE=4",
                "environment variable RANK is 4, it must be below WORLD_SIZE, which is 4",
            ),
            (
                "RANK=0 WORLD_SIZE=0",
                "environment variable WORLD_SIZE is 0, it must be from 1 to 1048576",
            ),
            (
                "RANK=0 WORLD_SIZE=1048577",
                "environment variable WORLD_SIZE is 1048577, it must be from 1 to 1048576",
            ),
            (
                "PMI_RANK=9 PMI_SIZE=4",
                "environment variable PMI_RANK is 9, it must be below PMI_SIZE, which is 4",
            ),
            (
                "SLURM_STEP_ID=0 SLURM_PROCID=4 SLURM_NTASKS=4",
                "environment variable SLURM_PROCID is 4, it must be below SLURM_NTASKS, which is 4",
            ),
            (
                "RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
                "environment variable LOCAL_RANK is 2, it must be below LOCAL_WORLD_SIZE, which is 2",
            ),
            (
                "RANK=0 WORLD_SIZE=4 LOCAL_RANK=4",
                "environment variable LOCAL_RANK is 4, it must be below WORLD_SIZE, which is 4",
            ),
            (
                "RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=8",
                "environment variable LOCAL_WORLD_SIZE is 8, it must be from 1 to 4",
            ),
        ]);
    }

    #[test]
    fn launchers_that_agree_are_one() {
        check(&[
            // `mpirun` inside a step, with a daemon for each rank.
            (
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2",
                "Open MPI: 1 of 2",
            ),
            // `srun --mpi=pmi2`, which leaves the machine to Slurm's variables.
            (
                "PMI_RANK=5 PMI_SIZE=8 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_NODEID=1 \
                 SLURM_STEP_TASKS_PER_NODE=4(x2)",
                "PMI: 5 of 8, local 1 of 4",
            ),
            // A script that hands MPI's numbers on to PyTorch.
            (
                "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
                "env://: 1 of 2, local 0",
            ),
        ]);
    }

    #[test]
    fn the_inner_of_two_launchers_is_believed_where_one_starts_the_other() {
        check(&[
            // An agent on each of two nodes, started by `srun`; the same by `mpirun`, with
            // variables of all three.
            (
                "RANK=6 WORLD_SIZE=8 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=x \
                 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0",
                "torchrun: 6 of 8, local 2 of 4",
            ),
            (
                "RANK=6 WORLD_SIZE=8 TORCHELASTIC_RUN_ID=x OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 \
                 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1",
                "torchrun: 6 of 8",
            ),
            ("RANK=6 WORLD_SIZE=8 TORCHELASTIC_RUN_ID=x PMI_RANK=1 PMI_SIZE=2", "torchrun: 6 of 8"),
            // An agent per node numbers the ranks as they arrive.
            (
                "RANK=1 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2",
                "torchrun: 1 of 2",
            ),
            // `mpirun` starts a daemon on each node by `srun`; `mpiexec` in a shell that `srun
            // --pty` gave.
            (
                "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2",
                "Open MPI: 5 of 8",
            ),
            ("PMI_RANK=3 PMI_SIZE=4 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1", "PMI: 3 of 4"),
            // The same, handed on to PyTorch.
            (
                "RANK=3 WORLD_SIZE=4 PMI_RANK=3 PMI_SIZE=4 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1",
                "env://: 3 of 4",
            ),
        ]);
    }

    #[test]
    fn launchers_that_contradict_each_other_are_refused() {
        check(&[
            (
                "RANK=0 WORLD_SIZE=8 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=8",
                "env:// says rank 0 of 8 (RANK, WORLD_SIZE), but Slurm says rank 3 of 8 (SLURM_PROCID, \
                 SLURM_STEP_NUM_TASKS or SLURM_NTASKS)",
            ),
            (
                "RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2",
                "env:// says rank 1 of 2 (RANK, WORLD_SIZE), but Open MPI says rank 0 of 2 (OMPI_COMM_WORLD_RANK, \
                 OMPI_COMM_WORLD_SIZE)",
            ),
            (
                "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=4",
                "Open MPI says rank 0 of 2 (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE), but PMI says rank 0 of 4 \
                 (PMI_RANK, PMI_SIZE)",
            ),
        ]);
    }

    #[test]
    fn an_inner_world_smaller_than_the_outer_is_refused() {
        let disagree = |vars: &str| matches!(outcome(vars), Err(Error::LaunchersDisagree { .. }));
        // `srun` from a shell that `mpirun` started: all tasks would take themselves for rank 0.
        assert!(disagree(
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4"
        ));
        // Four tasks that each start `torchrun --standalone`, which makes four worlds.
        let torchrun = "RANK=1 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x";
        assert!(disagree(&format!("{torchrun} SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4")));
    }

    #[cfg(feature = "serde")]
    #[test]
    fn deserializing_checks_what_reading_checks() {
        let json = r#"{"placement":{"rank":3,"world_size":4},"launcher":"open_mpi","local_rank":1,"local_world_size":2}"#;
        let launched: Launched = serde_json::from_str(json).unwrap();
        assert_eq!(serde_json::to_string(&launched).unwrap(), json);
        for (from, to) in
            [("\"local_rank\":1", "\"local_rank\":2"), ("size\":2", "size\":5"), ("\":3", "\":4")]
        {
            assert!(serde_json::from_str::<Launched>(&json.replace(from, to)).is_err(), "{to}");
        }
    }
}
