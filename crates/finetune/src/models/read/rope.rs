//! Reader of rotary positions: `rope_theta` and `rope_scaling`, or `rope_parameters`.

use serde::Deserialize;
use serde_json::Value;

use crate::models::{
    config::QueryScale,
    error::{ModelError, difference, field_error},
    read::fields::Fields,
    rope::{RopeConfig, RopePairs},
    scaling::RopeScaling,
};

/// The default base of the frequencies, as in the first Llama.
pub(super) const THETA: f64 = 10_000.;

/// The fields of rotary positions. Unknown fields are rejected, since they would change the rotation.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct RopeFields {
    rope_type: Option<String>,
    /// Older name of `rope_type`.
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    partial_rotary_factor: Option<f64>,
    attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    truncate: Option<bool>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
    llama_4_scaling_beta: Option<f64>,
    /// Ministral 3 has a copy of the model's field here.
    #[serde(rename = "max_position_embeddings")]
    _max_position_embeddings: Option<usize>,
    /// Whether the fields stand in an object of a kind of layer.
    #[serde(skip)]
    is_nested: bool,
}

/// The rotary positions of a `config.json`, with the defaults of a family.
#[derive(Debug)]
pub(super) struct RopeReader<'a> {
    pub(super) fields: &'a Fields,
    pub(super) head_dim: usize,
    pub(super) pairs: RopePairs,
    /// The part of a head that turns by default.
    pub(super) part: f64,
}

impl RopeReader<'_> {
    /// Returns the rotary positions of all layers, with the base `theta` if none is given.
    pub(super) fn read(&self, theta: f64) -> Result<RopeConfig, ModelError> {
        let rope = self.fields_of_all()?;
        if let Some(beta) = rope.llama_4_scaling_beta {
            let field = "rope_parameters.llama_4_scaling_beta";
            return Err(field_error(field, &beta, "missing in this architecture".into()));
        }
        self.config(&rope, theta)
    }

    /// Returns the rotary positions of all layers, and the factor of queries of Ministral 3.
    pub(super) fn read_with_query_scale(&self) -> Result<(RopeConfig, QueryScale), ModelError> {
        let rope = self.fields_of_all()?;
        let length = rope.original_max_position_embeddings.filter(|length| *length > 0);
        let query_scale = QueryScale {
            beta: required("rope_parameters.llama_4_scaling_beta", rope.llama_4_scaling_beta)?,
            length: required("rope_scaling.original_max_position_embeddings", length)?,
        };
        Ok((self.config(&rope, THETA)?, query_scale))
    }

    /// Returns the rotary positions of layers of a kind, `full_attention` or `sliding_attention`, if the
    /// file has a list by kind.
    pub(super) fn read_kind(
        &self,
        kind: &'static str,
        theta: f64,
    ) -> Result<Option<RopeConfig>, ModelError> {
        let Some(parameters) = self.fields.object("rope_parameters")? else { return Ok(None) };
        if !parameters.values().any(Value::is_object) {
            return Ok(None);
        }
        let Some(value) = parameters.get(kind).cloned() else {
            return Err(field_error("rope_parameters", &"without it", format!("one with {kind}")));
        };
        let rope = RopeFields { is_nested: true, ..serde_json::from_value(value)? };
        self.config(&rope, theta).map(Some)
    }

    /// Returns the fields in either layout, if both have the same meaning.
    fn fields_of_all(&self) -> Result<RopeFields, ModelError> {
        let read = |field| -> Result<Option<RopeFields>, ModelError> {
            let object = self.fields.object(field)?;
            Ok(object.map(|object| serde_json::from_value(object.into())).transpose()?)
        };
        let (scaling, parameters) = (read("rope_scaling")?, read("rope_parameters")?);
        if scaling.is_some() && parameters.is_some() && scaling != parameters {
            return Err(difference("rope_scaling", "rope_parameters"));
        }
        Ok(parameters.or(scaling).unwrap_or_default())
    }

    fn config(&self, rope: &RopeFields, theta: f64) -> Result<RopeConfig, ModelError> {
        Ok(RopeConfig {
            theta: self.theta(rope)?.unwrap_or(theta),
            scaling: self.scaling(rope)?,
            rotated: self.rotated(rope)?,
            pairs: self.pairs,
        })
    }

    fn theta(&self, rope: &RopeFields) -> Result<Option<f64>, ModelError> {
        let outer = self.fields.real("rope_theta")?.filter(|_| !rope.is_nested);
        match (outer, rope.rope_theta) {
            (Some(outer), Some(inner)) if outer.to_bits() != inner.to_bits() => {
                Err(difference("rope_theta", "rope_parameters.rope_theta"))
            }
            (outer, inner) => Ok(inner.or(outer)),
        }
    }

    /// Returns the number of elements of a head that turn.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a part of a head is rounded down"
    )]
    fn rotated(&self, rope: &RopeFields) -> Result<usize, ModelError> {
        let field = "partial_rotary_factor";
        let outer = self.fields.real(field)?;
        let part = match (outer, rope.partial_rotary_factor) {
            (Some(outer), Some(inner)) if outer.to_bits() != inner.to_bits() => {
                return Err(difference(field, "rope_parameters.partial_rotary_factor"));
            }
            (outer, inner) => inner.or(outer).unwrap_or(self.part),
        };
        if !(part > 0. && part <= 1.) {
            return Err(field_error(field, &part, "above 0 and at most 1".into()));
        }
        Ok((self.head_dim as f64 * part) as usize)
    }

    fn scaling(&self, rope: &RopeFields) -> Result<RopeScaling, ModelError> {
        if let (Some(new), Some(old)) = (&rope.rope_type, &rope.old_type)
            && new != old
        {
            return Err(difference("rope_scaling.rope_type", "rope_scaling.type"));
        }
        let name = rope.rope_type.as_ref().or(rope.old_type.as_ref());
        match name.map_or("default", String::as_str) {
            "default" => Ok(RopeScaling::Default),
            "linear" => Ok(RopeScaling::Linear { factor: factor(rope)? }),
            "llama3" => llama3(rope),
            // The first files of Phi 3 name LongRoPE after their divisors.
            "longrope" | "su" => self.longrope(rope),
            "yarn" if rope.short_factor.is_some() => self.longrope(rope),
            "yarn" => self.yarn(rope),
            other => {
                let expected = "default, linear, llama3, yarn or longrope".into();
                Err(field_error("rope_scaling.type", &other, expected))
            }
        }
    }

    fn yarn(&self, rope: &RopeFields) -> Result<RopeScaling, ModelError> {
        let factor = factor(rope)?;
        let original = rope.original_max_position_embeddings;
        let given = |value: Option<f64>| value.filter(|value| *value != 0.);
        // As in the paper: the softmax is a little flatter in longer texts.
        let flatness = |scale: f64| if factor <= 1. { 1. } else { 0.1 * scale * factor.ln() + 1. };
        let attention_factor = match (given(rope.mscale), given(rope.mscale_all_dim)) {
            (Some(scale), Some(all)) => flatness(scale) / flatness(all),
            _ => flatness(1.),
        };
        Ok(RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: original.map_or_else(|| self.positions(), Ok)?,
            beta_fast: rope.beta_fast.unwrap_or(32.),
            beta_slow: rope.beta_slow.unwrap_or(1.),
            // transformers does not read the field in an object of a kind of layer.
            truncate: rope.is_nested || rope.truncate.unwrap_or(true),
            attention_factor: rope.attention_factor.unwrap_or(attention_factor),
        })
    }

    fn longrope(&self, rope: &RopeFields) -> Result<RopeScaling, ModelError> {
        let outer = self.fields.size("original_max_position_embeddings")?;
        let original = outer.or(rope.original_max_position_embeddings).unwrap_or(4096);
        let factor = match rope.factor {
            Some(factor) => factor,
            None => self.positions()? as f64 / original as f64,
        };
        let flatness =
            if factor <= 1. { 1. } else { (1. + factor.ln() / (original as f64).ln()).sqrt() };
        Ok(RopeScaling::LongRope {
            original_max_position_embeddings: original,
            short_factor: required("rope_scaling.short_factor", rope.short_factor.clone())?,
            long_factor: required("rope_scaling.long_factor", rope.long_factor.clone())?,
            attention_factor: rope.attention_factor.unwrap_or(flatness),
        })
    }

    fn positions(&self) -> Result<usize, ModelError> {
        self.fields.required_size("max_position_embeddings")
    }
}

fn llama3(rope: &RopeFields) -> Result<RopeScaling, ModelError> {
    Ok(RopeScaling::Llama3 {
        factor: factor(rope)?,
        low_freq_factor: required("rope_scaling.low_freq_factor", rope.low_freq_factor)?,
        high_freq_factor: required("rope_scaling.high_freq_factor", rope.high_freq_factor)?,
        original_max_position_embeddings: required(
            "rope_scaling.original_max_position_embeddings",
            rope.original_max_position_embeddings,
        )?,
    })
}

fn factor(rope: &RopeFields) -> Result<f64, ModelError> {
    required("rope_scaling.factor", rope.factor)
}

/// Returns the value of a field that the type of scaling requires.
fn required<T>(field: &'static str, value: Option<T>) -> Result<T, ModelError> {
    value.ok_or_else(|| field_error(field, &"missing", "given for this type of scaling".into()))
}
