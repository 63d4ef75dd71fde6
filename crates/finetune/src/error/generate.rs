//! Errors of generation.

/// Why no text can be generated as requested.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The prompt has no token.
    #[error("the prompt has no token that a text could begin with")]
    EmptyPrompt,
    /// The prompt is longer than the model's positions.
    #[error("the prompt has {length} tokens, and the model has {context} positions")]
    LongPrompt {
        /// The number of tokens.
        length: usize,
        /// The positions of the model.
        context: usize,
    },
    /// The temperature is not a positive number.
    #[error("the temperature is {temperature}, must be above 0")]
    Temperature {
        /// The temperature.
        temperature: f64,
    },
}
