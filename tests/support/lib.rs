//! Fixtures and check helpers shared by the tests and the benches.
