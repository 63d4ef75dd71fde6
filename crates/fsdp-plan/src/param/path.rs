//! What the dotted name of a parameter tells: its layer, and which rules it answers to.

use std::iter;

/// Returns the layer that the parameter `name` belongs to: the rule of
/// [`ParameterInfo`](crate::ParameterInfo).
pub(crate) fn layer_of(name: &str) -> &str {
    block_end(name).or_else(|| name.rfind('.')).map_or(name, |end| &name[..end])
}

/// Whether `layer` is one of a numbered series, such as the blocks of a transformer.
pub(crate) fn is_block(layer: &str) -> bool {
    layer.as_bytes().rsplit(|&byte| byte == b'.').next().is_some_and(is_number)
}

/// Whether the components of `pattern` occur in `path`, side by side: `h.1` is in `h.1.attn`, not
/// in `h.10.attn`.
pub(crate) fn has_components(path: &str, pattern: &str) -> bool {
    let mut tails = iter::successors(Some(path), |tail| tail.split_once('.').map(|(_, rest)| rest));
    let ends_component = |rest: &str| rest.is_empty() || rest.starts_with('.');
    tails.any(|tail| tail.strip_prefix(pattern).is_some_and(ends_component))
}

/// Where the first number among the components of `name` ends.
fn block_end(name: &str) -> Option<usize> {
    let mut end = 0;
    // Components are short, and looking for dots byte by byte is twice as fast as searching text
    // for them.
    for component in name.as_bytes().split(|&byte| byte == b'.') {
        end += component.len();
        if is_number(component) {
            return Some(end);
        }
        end += 1;
    }
    None
}

fn is_number(component: &[u8]) -> bool {
    !component.is_empty() && component.iter().all(u8::is_ascii_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_end_at_the_first_number() {
        for (name, layer) in [
            ("h.10.attn.c_attn.weight", "h.10"),
            ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3"),
            ("0.weight", "0"),
            ("h.0", "h.0"),
            ("transformer.wte.weight", "transformer.wte"),
            ("wte.weight", "wte"),
            ("scale", "scale"),
            ("", ""),
            ("layer10.weight", "layer10"),
            ("é.1.w", "é.1"),
        ] {
            assert_eq!(layer_of(name), layer, "{name}");
        }
    }

    #[test]
    fn blocks_end_in_a_number() {
        for (layer, expected) in
            [("h.0", true), ("7", true), ("h", false), ("h.0a", false), ("h.", false), ("", false)]
        {
            assert_eq!(is_block(layer), expected, "{layer}");
        }
    }

    #[test]
    fn patterns_match_whole_components() {
        for (path, pattern, expected) in [
            ("transformer.h.1.attn", "h", true),
            ("transformer.h.1.attn", "h.1", true),
            ("transformer.h.10.attn", "h.1", false),
            ("layer10.weight", "layer1", false),
            ("lm_head.weight", "head", false),
            ("head", "head", true),
            ("a.b", "a.b.c", false),
            ("a.b", "", false),
            ("xa.a.a", "a.a", true),
        ] {
            assert_eq!(has_components(path, pattern), expected, "{pattern} in {path}");
        }
    }
}
