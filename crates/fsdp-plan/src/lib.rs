//! Which rank owns which part of every parameter, and what that costs, as plain data.
