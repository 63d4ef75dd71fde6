//! The fields of a JSON object, by their names and types.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::models::error::{ModelError, field_error};

/// The fields of a `config.json`.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    pub(super) fn parse(json: &str) -> Result<Self, ModelError> {
        Ok(Self(serde_json::from_str(json)?))
    }

    /// Adds fields that are missing.
    pub(super) fn with_defaults(&self, defaults: &[(&str, usize)]) -> Self {
        let mut fields = self.0.clone();
        for (field, value) in defaults {
            fields.entry(*field).or_insert_with(|| (*value).into());
        }
        Self(fields)
    }

    /// Returns the fields of the text part of a model that also sees images. Those that both parts have in
    /// common are the model's, if it has them.
    pub(super) fn text_part(&self) -> Result<Self, ModelError> {
        let field = "text_config";
        let mut text = self.object(field)?.ok_or_else(|| missing(field))?;
        // The type has an old and a new name.
        for common in [&["tie_word_embeddings"][..], &["dtype", "torch_dtype"]] {
            if common.iter().any(|field| self.is_given(field)) {
                for field in common {
                    text.insert((*field).into(), self.0.get(*field).cloned().unwrap_or_default());
                }
            }
        }
        Ok(Self(text))
    }

    /// Returns a field of any type; null if it is missing.
    pub(super) fn value(&self, field: &str) -> &Value {
        self.0.get(field).unwrap_or(&Value::Null)
    }

    /// Returns true if a field is there and not null.
    pub(super) fn is_given(&self, field: &str) -> bool {
        self.0.get(field).is_some_and(|value| !value.is_null())
    }

    /// Returns true if a field is null. A missing field and null may have different meanings.
    pub(super) fn is_null(&self, field: &str) -> bool {
        self.0.get(field).is_some_and(Value::is_null)
    }

    /// Returns a field that is there and not null.
    fn get<T: DeserializeOwned>(
        &self,
        field: &'static str,
        expected: &str,
    ) -> Result<Option<T>, ModelError> {
        match self.0.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value.clone())
                .map(Some)
                .map_err(|_| field_error(field, value, expected.to_owned())),
        }
    }

    /// Returns a number of things.
    pub(super) fn size(&self, field: &'static str) -> Result<Option<usize>, ModelError> {
        self.get(field, "an integer of at least 0")
    }

    /// Returns a number of things that must be given.
    pub(super) fn required_size(&self, field: &'static str) -> Result<usize, ModelError> {
        self.size(field)?.ok_or_else(|| missing(field))
    }

    pub(super) fn real(&self, field: &'static str) -> Result<Option<f64>, ModelError> {
        self.get(field, "a number")
    }

    pub(super) fn flag(&self, field: &'static str) -> Result<Option<bool>, ModelError> {
        self.get(field, "true or false")
    }

    pub(super) fn text(&self, field: &'static str) -> Result<Option<String>, ModelError> {
        self.get(field, "a text")
    }

    pub(super) fn list<T: DeserializeOwned>(
        &self,
        field: &'static str,
        expected: &str,
    ) -> Result<Option<Vec<T>>, ModelError> {
        self.get(field, expected)
    }

    /// Returns the fields of an object.
    pub(super) fn object(
        &self,
        field: &'static str,
    ) -> Result<Option<Map<String, Value>>, ModelError> {
        self.get(field, "an object")
    }
}

/// Returns the error of a field that must be given.
pub(super) fn missing(field: &'static str) -> ModelError {
    field_error(field, &"missing", "given in this architecture".into())
}
