#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

#[cfg(feature = "candle")]
mod collate;
mod dataset;
mod error;
mod loader;
mod queue;
mod read;

pub use crate::{
    dataset::{
        Dataset,
        cached::CachedDataset,
        concat::{ConcatDataset, concat},
        map::{MapDataset, SeededMapDataset},
        measure::measure,
        subset::SubsetDataset,
    },
    error::{BoxError, Error, NpyFault, Result},
    loader::{
        DataLoader,
        builder::LoaderBuilder,
        fetch::SampleBatch,
        skipped::{OnError, SkippedSample, SkippedSamples},
        state::LoaderState,
    },
    queue::{PrefetchBuilder, PrefetchIter, prefetch},
    read::{
        jsonl::JsonlDataset,
        line_index::IndexPlace,
        npy::{
            NpyDataset, NumberArray,
            dtype::{NpyDtype, NpyElement, NpyNumber},
            header::NpyHeader,
        },
        sharded::{ShardSource, ShardedDataset},
        split_text::TextUnit,
        text::{TextConfig, TextDataset},
        tokens::{TokenDataset, TokenType},
    },
};
