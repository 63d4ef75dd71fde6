//! Tests of atomic files and folders, which check the state between every two system calls.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    fs,
    io::{ErrorKind, Write},
    path::Path,
};

use super::{AtomicFile, AtomicFolder, back_up, is_partial, restore_replaced, write};

type FileObserver = Box<dyn FnMut(&Path)>;

thread_local! {
    static OBSERVER: RefCell<Option<FileObserver>> = const { RefCell::new(None) };
}

/// Calls the observer of this thread. The observer may work with files too, so it is not set
/// meanwhile.
pub(super) fn observe(path: &Path) {
    let Some(mut observer) = OBSERVER.take() else { return };
    observer(path);
    OBSERVER.set(Some(observer));
}

/// Runs `f`, and `observer` between any two of its system calls; returns the number of calls of
/// `observer`.
fn observed(f: impl FnOnce(), mut observer: impl FnMut(&Path) + 'static) -> usize {
    let count = std::rc::Rc::new(std::cell::Cell::new(0));
    let counted = count.clone();
    OBSERVER.set(Some(Box::new(move |path| {
        counted.set(counted.get() + 1);
        observer(path);
    })));
    f();
    OBSERVER.set(None);
    count.get()
}

fn temp_folder() -> AtomicFolder {
    AtomicFolder::new(std::env::temp_dir().join("files")).unwrap()
}

/// Returns the names in `folder`, except names of unfinished files.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| !is_partial(name)).collect()
}

#[test]
fn killed_write_keeps_whole_content() {
    let folder = temp_folder();
    let target = folder.path().join("model");
    for (old, new) in [(None, "first"), (Some("first"), "second, longer")] {
        let (seen, path) = (folder.path().to_path_buf(), target.clone());
        let n_calls = observed(
            || write(&target, new.as_bytes()).unwrap(),
            move |_| {
                let found = fs::read_to_string(&path).ok();
                assert!(found.as_deref() == old || found.as_deref() == Some(new), "{found:?}");
                assert!(names(&seen).iter().all(|name| name == "model"));
            },
        );
        assert_eq!(n_calls, 6, "name, file, bytes, sync, rename, folder");
        assert_eq!(fs::read_to_string(&target).unwrap(), new);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left");
}

#[test]
fn killed_backup_is_whole_or_missing() {
    let folder = temp_folder();
    let target = folder.path().join("log.jsonl");
    let copy = folder.path().join("log.damaged-0002.jsonl");
    write(folder.path().join("log.damaged-0001.jsonl"), b"earlier").unwrap();
    write(&target, b"line").unwrap();
    let path = copy.clone();
    let n_calls = observed(
        || assert_eq!(back_up(&target, "damaged").unwrap(), copy),
        move |_| assert!(!path.exists() || fs::read(&path).unwrap() == b"line"),
    );
    assert_eq!(n_calls, 6);
    assert_eq!(fs::read(folder.path().join("log.damaged-0001.jsonl")).unwrap(), b"earlier");
    assert_eq!(names(folder.path()).len(), 3);
}

#[test]
fn killed_folder_is_whole_or_missing() {
    let folder = temp_folder();
    let target = folder.path().join("model");
    let path = target.clone();
    let n_calls = observed(
        || {
            let model = AtomicFolder::new(&target).unwrap();
            fs::create_dir(model.path().join("deep")).unwrap();
            fs::write(model.path().join("deep/file"), "bytes").unwrap();
            model.persist().unwrap();
        },
        move |_| {
            assert!(!path.exists() || fs::read(path.join("deep/file")).unwrap() == b"bytes");
        },
    );
    assert_eq!(n_calls, 8, "name, folder, file, two folders in it, rename, and each folder's sync");
    assert_eq!(names(folder.path()), ["model"]);
    assert!(AtomicFolder::new(&target).unwrap().persist().is_err(), "a full folder stays");
    assert_eq!(fs::read(target.join("deep/file")).unwrap(), b"bytes");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left");
}

#[test]
fn killed_replacement_restores_one_folder() {
    let parent = temp_folder();
    let target = parent.path().join("best");
    fs::create_dir(&target).unwrap();
    fs::write(target.join("step"), "1").unwrap();
    let [from, to] = [parent.path().to_owned(), parent.path().join("copies")];
    let new = AtomicFolder::new(&target).unwrap();
    fs::write(new.path().join("step"), "2").unwrap();
    let mut is_replaced = false;
    let n_calls = observed(
        || new.replace().unwrap(),
        move |_| {
            // The copy is the state that a kill leaves.
            fs::create_dir(&to).unwrap();
            for name in names(&from).iter().filter(|name| *name != "copies") {
                fs::create_dir(to.join(name)).unwrap();
                fs::copy(from.join(name).join("step"), to.join(name).join("step")).unwrap();
            }
            restore_replaced(to.join("best")).unwrap();
            let step = fs::read_to_string(to.join("best/step")).unwrap();
            is_replaced |= step == "2";
            assert_eq!(step, if is_replaced { "2" } else { "1" });
            assert_eq!(names(&to), ["best"]);
            fs::remove_dir_all(&to).unwrap();
        },
    );
    assert_eq!(n_calls, 6, "file, folder, rename, folder, rename, folder");
    assert_eq!(fs::read_to_string(target.join("step")).unwrap(), "2");
    assert_eq!(names(parent.path()), ["best"]);
}

#[test]
fn leftovers_of_a_replacement_are_replaced() {
    let parent = temp_folder();
    let target = parent.path().join("best");
    for folder in ["best", "best.replaced"] {
        fs::create_dir(parent.path().join(folder)).unwrap();
        fs::write(parent.path().join(folder).join("step"), "1").unwrap();
    }
    let new = AtomicFolder::new(&target).unwrap();
    fs::write(new.path().join("step"), "2").unwrap();
    new.replace().unwrap();
    assert_eq!(fs::read_to_string(target.join("step")).unwrap(), "2");
    assert_eq!(names(parent.path()), ["best"]);
}

#[test]
fn dropped_files_keep_the_target() {
    let folder = temp_folder();
    let target = folder.path().join("model");
    write(&target, b"old").unwrap();
    let mut file = AtomicFile::new(&target).unwrap();
    file.write_all(b"half of it").unwrap();
    drop(file);
    drop(AtomicFolder::new(&target).unwrap());
    assert_eq!(fs::read(&target).unwrap(), b"old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    let refused = AtomicFile::new(folder.path()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidInput, "a folder is no file");
}

#[test]
fn partial_names_are_unique() {
    let folder = temp_folder();
    let target = folder.path().join("model");
    let files: Vec<_> = (0..100).map(|_| AtomicFile::new(&target).unwrap()).collect();
    let paths: BTreeSet<_> = files.iter().map(AtomicFile::path).collect();
    assert_eq!(paths.len(), 100);
    assert!(paths.iter().all(|path| is_partial(path.file_name().unwrap())));
    for other in
        [".partial", ".0123.partial", "0123456789abcdef.partial", ".0123456789ABCDEF.partial", ".x"]
    {
        assert!(!is_partial(other), "{other}");
    }
}

#[cfg(unix)]
#[test]
fn planted_link_is_not_followed() {
    let folder = temp_folder();
    let [precious, target] = ["precious", "model"].map(|name| folder.path().join(name));
    fs::write(&precious, "kept").unwrap();
    // An attacker has guessed the first two names.
    let (mut left, outside) = (2, precious.clone());
    observed(
        || write(&target, b"new").unwrap(),
        move |path| {
            if left > 0 && !path.exists() {
                left -= 1;
                std::os::unix::fs::symlink(&outside, path).unwrap();
            }
        },
    );
    assert_eq!(fs::read_to_string(&precious).unwrap(), "kept");
    assert_eq!(fs::read_to_string(&target).unwrap(), "new");
    assert!(fs::symlink_metadata(&target).unwrap().is_file());
}

#[cfg(unix)]
#[test]
fn writing_keeps_links_and_permissions() {
    use std::os::unix::fs::{PermissionsExt, symlink};

    let folder = temp_folder();
    let [file, link, chain] = ["file", "link", "chain"].map(|name| folder.path().join(name));
    fs::write(&file, "old").unwrap();
    symlink("file", &link).unwrap();
    symlink(&link, &chain).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    for bits in [0o600, 0o444, 0o755] {
        fs::set_permissions(&file, fs::Permissions::from_mode(bits)).unwrap();
        write(&chain, format!("{bits:o}").as_bytes()).unwrap();
        assert_eq!((fs::read_to_string(&file).unwrap(), mode(&file)), (format!("{bits:o}"), bits));
    }
    assert!([&link, &chain].iter().all(|path| path.is_symlink()));
    let [plain, atomic] = ["plain", "atomic"].map(|name| folder.path().join(name));
    fs::write(&plain, "").unwrap();
    write(&atomic, b"").unwrap();
    assert_eq!(mode(&atomic), mode(&plain), "new files have the permissions of new files");
    symlink("loop", folder.path().join("loop")).unwrap();
    assert!(write(folder.path().join("loop"), b"").is_err());
}

#[cfg(unix)]
#[test]
fn devices_are_written_to() {
    write("/dev/null", b"gone").unwrap();
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
}
