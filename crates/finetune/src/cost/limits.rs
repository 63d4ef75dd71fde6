//! How much memory this process may take.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A limit of memory, and who set it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    /// How much all `n_processes` together may take.
    pub(crate) bytes: u64,
    /// What sets it, in words.
    pub(crate) source: String,
    /// How many processes of the run share it.
    pub(crate) n_processes: u64,
}

impl Limit {
    /// A limit of this process alone.
    pub(crate) fn of_process(bytes: u64, source: impl Into<String>) -> Self {
        Self { bytes, source: source.into(), n_processes: 1 }
    }

    /// What one process may take.
    pub(crate) fn share(&self) -> u64 {
        self.bytes / self.n_processes
    }
}

/// The limits that the system sets for this process, one of `n_processes` of a run on this machine:
/// none where the system is not Linux.
pub(crate) fn of_system(n_processes: u64) -> Vec<Limit> {
    found_in(Path::new("/"), n_processes)
}

/// The limits that the files under `root` tell of.
fn found_in(root: &Path, n_processes: u64) -> Vec<Limit> {
    let read = |path: &str| fs::read_to_string(root.join(path)).ok();
    let mut limits = Vec::new();
    if let Some(bytes) = read("proc/self/limits").as_deref().and_then(address_space) {
        limits.push(Limit::of_process(bytes, "its address space (ulimit -v)"));
    }
    let groups = read("proc/self/cgroup").map_or_else(Vec::new, |list| group_files(&list));
    for file in groups {
        let text = fs::read_to_string(root.join(&file));
        if let Some(bytes) = text.ok().as_deref().and_then(number) {
            let source = format!("its cgroup (/{})", file.display());
            limits.push(Limit { bytes, source, n_processes });
        }
    }
    limits
}

/// The memory of this machine with its swap, in bytes; `None` where the system is not Linux.
pub(crate) fn of_machine() -> Option<u64> {
    total(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// The limit of the address space in a `/proc/PID/limits`, if there is one.
fn address_space(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Memory and swap in a `/proc/meminfo`.
fn total(meminfo: &str) -> Option<u64> {
    let of = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
    };
    of("MemTotal:")?.checked_add(of("SwapTotal:")?)
}

/// Where the limits of the cgroups in a `/proc/PID/cgroup` stand: those of version 2, where a group
/// is limited by each group that it is in, and those of version 1.
fn group_files(list: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in list.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let (folder, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            one if one.split(',').any(|one| one == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        // In a container the outer groups are hidden, and its own is the root.
        let groups = Path::new(group.trim_start_matches('/')).ancestors();
        files.extend(groups.map(|group| Path::new(folder).join(group).join(file)));
    }
    files
}

/// The number of a limit, which may be `max` for none.
fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The limits found in files of these contents, as bytes.
    fn found(files: &[(&str, &str)]) -> Vec<u64> {
        let root = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        found_in(root.path(), 2).iter().map(|limit| limit.bytes).collect()
    }

    #[test]
    fn every_kind_of_limit_is_found() {
        assert!(found(&[]).is_empty());
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max data size             unlimited            unlimited            bytes     \n\
                      Max address space         6144000000           unlimited            bytes     \n";
        assert_eq!(found(&[("proc/self/limits", limits)]), [6_144_000_000]);
        let unlimited = limits.replace("6144000000", "unlimited ");
        assert!(found(&[("proc/self/limits", &unlimited)]).is_empty());
        let meminfo = "MemTotal:        100 kB\nMemFree: 3 kB\nSwapTotal:       28 kB\n";
        assert_eq!(total(meminfo), Some(128 * 1024));
    }

    #[test]
    fn a_cgroup_is_limited_by_those_around_it() {
        let second = [
            ("proc/self/cgroup", "0::/job.slice/step\n"),
            ("sys/fs/cgroup/job.slice/step/memory.max", "max\n"),
            ("sys/fs/cgroup/job.slice/memory.max", "4096\n"),
            ("sys/fs/cgroup/memory.max", "8192\n"),
        ];
        assert_eq!(found(&second), [4096, 8192]);
        let first = [
            ("proc/self/cgroup", "5:cpu:/a\n4:memory,hugetlb:/docker/0f\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "512\n"),
            ("sys/fs/cgroup/a/memory.max", "1\n"),
        ];
        assert_eq!(found(&first), [512]);
    }

    #[test]
    fn processes_share_the_limit_of_their_group() {
        assert_eq!(Limit { bytes: 9, source: String::new(), n_processes: 2 }.share(), 4);
        assert_eq!(Limit::of_process(9, "").share(), 9);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_system_has_memory() {
        assert!(of_machine().is_some_and(|bytes| bytes > 1 << 20));
    }
}
