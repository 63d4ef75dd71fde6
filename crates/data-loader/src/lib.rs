//! [`BoxError`]: crate::BoxError
//! [`ConcatDataset`]: crate::ConcatDataset
//! [`DataLoader`]: crate::DataLoader
//! [`Dataset`]: crate::Dataset
//! [`IndexPlace`]: crate::IndexPlace
//! [`JsonlDataset`]: crate::JsonlDataset
//! [`LoaderBuilder`]: crate::LoaderBuilder
//! [`LoaderState`]: crate::LoaderState
//! [`MapDataset`]: crate::MapDataset
//! [`NpyDataset`]: crate::NpyDataset
//! [`NpyDtype`]: crate::NpyDtype
//! [`NpyElement`]: crate::NpyElement
//! [`NpyFault`]: crate::NpyFault
//! [`NpyHeader`]: crate::NpyHeader
//! [`NpyNumber`]: crate::NpyNumber
//! [`NumberArray`]: crate::NumberArray
//! [`OnError`]: crate::OnError
//! [`PrefetchBuilder`]: crate::PrefetchBuilder
//! [`PrefetchIter`]: crate::PrefetchIter
//! [`SampleBatch`]: crate::SampleBatch
//! [`ShardSource`]: crate::ShardSource
//! [`ShardedDataset`]: crate::ShardedDataset
//! [`SkippedSample`]: crate::SkippedSample
//! [`SkippedSamples`]: crate::SkippedSamples
//! [`SubsetDataset`]: crate::SubsetDataset
//! [`TextConfig`]: crate::TextConfig
//! [`TextDataset`]: crate::TextDataset
//! [`TextUnit`]: crate::TextUnit
//! [`TokenDataset`]: crate::TokenDataset
//! [`TokenType`]: crate::TokenType
//! [`concat`]: crate::concat()
//! [`measure`]: crate::measure()
//! [`prefetch`]: crate::prefetch()
// The README links to docs.rs. Of two definitions of a link the first wins, so on this page the
// definitions above replace the README's and point into this crate.
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
        concat::{ConcatDataset, concat},
        map::MapDataset,
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
        listing::list_files,
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
