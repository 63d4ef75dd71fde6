//! The beginning of a checkpoint's file that nobody checked: none panics, as one of format version 1
//! or as one of version 2 whose checksum the index has.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // Whether it is refused is a matter of the bytes. A prefix that says how long the text is would
    // be wrong after every change of its length, so the text is read behind the right one, too.
    let _ = dist_train::fuzzing::shard(bytes);
    let prefix = (bytes.len() as u64).to_le_bytes();
    let _ = dist_train::fuzzing::shard(&[&prefix, bytes].concat());
});
