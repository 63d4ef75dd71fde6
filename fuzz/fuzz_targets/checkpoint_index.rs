//! The index of a checkpoint that nobody checked: no text panics, and what is read is written as it
//! was.
//!
//! Chance finds no checksum: a text that could have one at its end is read with the right one, too.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    // Whether it is refused is a matter of the text.
    let _ = dist_checkpoint::fuzzing::index(text);
});
