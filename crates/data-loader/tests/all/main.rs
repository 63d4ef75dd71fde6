mod histories;
mod loader;
mod queue;
mod readers;
mod sources;
mod states;
