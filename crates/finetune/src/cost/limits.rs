//! Limits of the memory of this process.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A memory limit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryLimit {
    /// Maximum bytes of all `n_processes` together.
    pub bytes: u64,
    /// Origin of the limit, in words.
    pub source: String,
    /// Number of processes that share the limit; 0 counts as 1.
    pub n_processes: u64,
}

impl MemoryLimit {
    /// Makes a limit of this process alone.
    pub fn for_process(bytes: u64, source: impl Into<String>) -> Self {
        Self { bytes, source: source.into(), n_processes: 1 }
    }

    /// Returns the bytes that one process may take.
    pub fn share(&self) -> u64 {
        self.bytes / self.n_processes.max(1)
    }
}

/// Returns the limits of this process on Linux: its address space, and its cgroups, which all
/// `n_processes` of a run on this machine share. On other systems the list is empty.
pub fn system_limits(n_processes: u64) -> Vec<MemoryLimit> {
    limits_under(Path::new("/"), n_processes)
}

/// Returns the limits in the files under `root`.
fn limits_under(root: &Path, n_processes: u64) -> Vec<MemoryLimit> {
    let read = |path: &str| fs::read_to_string(root.join(path)).ok();
    let mut limits = Vec::new();
    if let Some(bytes) = read("proc/self/limits").as_deref().and_then(address_space) {
        limits.push(MemoryLimit::for_process(bytes, "its address space (ulimit -v)"));
    }
    let files = read("proc/self/cgroup").map_or_else(Vec::new, |list| group_files(&list));
    for file in files {
        let text = fs::read_to_string(root.join(&file)).ok();
        if let Some(bytes) = text.as_deref().and_then(parse_limit) {
            let source = format!("its cgroup (/{})", file.display());
            limits.push(MemoryLimit { bytes, source, n_processes });
        }
    }
    limits
}

/// Returns the bytes of memory and swap of this machine, or `None` if the system is not Linux.
pub fn machine_bytes() -> Option<u64> {
    memory_and_swap(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// Returns the limit of the address space in a `/proc/PID/limits`, if there is one.
fn address_space(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the bytes of memory and swap in a `/proc/meminfo`.
fn memory_and_swap(meminfo: &str) -> Option<u64> {
    let field_bytes = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
    };
    field_bytes("MemTotal:")?.checked_add(field_bytes("SwapTotal:")?)
}

/// Returns the limit files of the cgroups in a `/proc/PID/cgroup`, version 1 or 2. The limits of outer
/// groups also apply to inner groups, so their files are included.
fn group_files(list: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in list.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let (folder, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            names if names.split(',').any(|controller| controller == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        // In a container, only the container's own group is visible, and it is the root. The last
        // of the `ancestors` is the root, an empty path, so its limit is found.
        let groups = Path::new(group.trim_start_matches('/')).ancestors();
        files.extend(groups.map(|group| Path::new(folder).join(group).join(file)));
    }
    files
}

/// Parses a limit in bytes. Returns `None` for `max`, which is no limit.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the limits found in these files, in bytes.
    fn found(files: &[(&str, &str)]) -> Vec<u64> {
        let root = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        limits_under(root.path(), 2).iter().map(|limit| limit.bytes).collect()
    }

    #[test]
    fn limits_of_all_kinds_are_found() {
        assert!(found(&[]).is_empty());
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max data size             unlimited            unlimited            bytes     \n\
                      Max address space         6144000000           unlimited            bytes     \n";
        assert_eq!(found(&[("proc/self/limits", limits)]), [6_144_000_000]);
        let unlimited = limits.replace("6144000000", "unlimited ");
        assert!(found(&[("proc/self/limits", &unlimited)]).is_empty());
        let meminfo = "MemTotal:        100 kB\nMemFree: 3 kB\nSwapTotal:       28 kB\n";
        assert_eq!(memory_and_swap(meminfo), Some(128 * 1024));
    }

    #[test]
    fn parent_cgroups_limit_their_children() {
        let version_2 = [
            ("proc/self/cgroup", "0::/job.slice/step\n"),
            ("sys/fs/cgroup/job.slice/step/memory.max", "max\n"),
            ("sys/fs/cgroup/job.slice/memory.max", "4096\n"),
            ("sys/fs/cgroup/memory.max", "8192\n"),
        ];
        assert_eq!(found(&version_2), [4096, 8192]);
        let version_1 = [
            ("proc/self/cgroup", "5:cpu:/a\n4:memory,hugetlb:/docker/0f\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "512\n"),
            ("sys/fs/cgroup/a/memory.max", "1\n"),
        ];
        assert_eq!(found(&version_1), [512]);
    }

    #[test]
    fn processes_share_the_limit_of_their_group() {
        assert_eq!(MemoryLimit { bytes: 9, source: String::new(), n_processes: 2 }.share(), 4);
        assert_eq!(MemoryLimit::for_process(9, "").share(), 9);
        assert_eq!(MemoryLimit { bytes: 9, source: String::new(), n_processes: 0 }.share(), 9);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_system_has_memory() {
        assert!(machine_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
