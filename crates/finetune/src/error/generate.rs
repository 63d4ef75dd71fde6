//! Errors of generation.

/// An error of an invalid request for text.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The prompt has no token.
    #[error("the prompt has no token to begin a text with")]
    EmptyPrompt,
    /// The prompt is longer than the model's positions.
    #[error("the prompt has {length} tokens, but the model has {context} positions")]
    LongPrompt {
        /// The number of tokens.
        length: usize,
        /// The positions of the model.
        context: usize,
    },
    /// The temperature is not a positive number.
    #[error("the temperature is {temperature}, must be a finite number above 0")]
    Temperature {
        /// The temperature.
        temperature: f64,
    },
}
