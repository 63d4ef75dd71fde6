//! Untrusted checkpoint indexes: no text panics, and an accepted one is written as it was read.
//!
//! Random inputs have no valid checksum, so a text with room for one is also read with the correct
//! one.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    // Whether it is refused is a matter of the text.
    let _ = dist_checkpoint::fuzzing::index(text);
});
