//! Reads the header of a checkpoint's file, with the right checksum: no bytes may panic.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // Whether it is refused is a matter of the bytes. A prefix that says how long the text is would
    // be wrong after every change of its length, so the text is read behind the right one, too.
    let _ = dist_checkpoint::fuzzing::shard(bytes);
    let prefix = (bytes.len() as u64).to_le_bytes();
    let _ = dist_checkpoint::fuzzing::shard(&[&prefix, bytes].concat());
});
