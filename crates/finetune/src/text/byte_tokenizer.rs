//! The tokenizer of byte models.
//!
//! A folder with only a `config.json` is a model for experiments, without any download. Its
//! tokenizer is saved with the weights in the standard format.

use serde_json::{Map, Value, json};

/// The text of the token that ends a text.
pub(crate) const END: &str = "<|end|>";

/// The number of byte values. A byte's value is its token id.
pub(crate) const N_BYTES: u32 = 256;

/// Returns the `tokenizer.json` of bytes, with the end token `end`.
pub(crate) fn tokenizer_json(end: u32) -> Value {
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    let mut vocab: Map<String, Value> = characters().zip(0_u32..).map(vocab_entry).collect();
    vocab.insert(END.to_owned(), end.into());
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": end, "content": END, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": [],
        },
    })
}

/// Returns the `tokenizer_config.json` that goes with [`tokenizer_json`].
pub(crate) fn tokenizer_config_json() -> Value {
    json!({
        "eos_token": END,
        "clean_up_tokenization_spaces": false,
        "tokenizer_class": "PreTrainedTokenizerFast",
    })
}

fn vocab_entry((character, id): (char, u32)) -> (String, Value) {
    (character.to_string(), id.into())
}

/// Returns the character that stands for each byte in tokenizers since GPT-2. Printable Latin 1
/// characters stand for themselves, and U+0100 and following for all other bytes, in order.
fn characters() -> impl Iterator<Item = char> {
    let mut substitutes = '\u{100}'..;
    (0..=u8::MAX).map(move |byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => substitutes.next().unwrap_or(char::REPLACEMENT_CHARACTER),
    })
}
