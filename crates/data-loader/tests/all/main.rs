//! The laws of data sets and loaders, on random input and with every fault.

mod histories;
mod loader;
mod queue;
mod readers;
mod sources;
mod states;
