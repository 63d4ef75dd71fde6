//! What a model writes: a token after the other, each by the logits of all tokens before it.
//!
//! Keys and values of earlier tokens are not kept but computed again for each token. So the tokens
//! are by definition those of the model that is trained, and n of them take as long as n forward
//! passes.

mod folders;
mod prompt;
mod sampling;
mod weights;
mod writer;

pub(crate) use self::{
    folders::{model_folder, open},
    prompt::Prompt,
    sampling::Sampling,
    writer::{Length, Written},
};
