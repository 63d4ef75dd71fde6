//! The tokenizer of a model without one: its tokens are bytes.
//!
//! A `config.json` alone makes a model to try things with, and nothing has to be downloaded. Its
//! tokenizer is written beside its weights like any other, in the form that every tool reads.

use serde_json::{Map, Value, json};

/// The text of the token that ends a text.
pub(crate) const END: &str = "<|end|>";

/// The number of bytes; the token of a byte has its number.
pub(crate) const N_BYTES: u32 = 256;

/// Returns the `tokenizer.json` of bytes, with a token that ends a text.
pub(crate) fn tokenizer_json(end: u32) -> Value {
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    let mut vocab: Map<String, Value> = characters().zip(0_u32..).map(token).collect();
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

/// Returns the `tokenizer_config.json` beside it.
pub(crate) fn tokenizer_config_json() -> Value {
    json!({
        "eos_token": END,
        "clean_up_tokenization_spaces": false,
        "tokenizer_class": "PreTrainedTokenizerFast",
    })
}

fn token((character, id): (char, u32)) -> (String, Value) {
    (character.to_string(), id.into())
}

/// Returns the characters of bytes in tokenizers since GPT-2: printable ones of Latin 1 are
/// themselves, the others U+0100 and following in their order.
fn characters() -> impl Iterator<Item = char> {
    let mut others = '\u{100}'..;
    (0..=u8::MAX).map(move |byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => others.next().unwrap_or(char::REPLACEMENT_CHARACTER),
    })
}
