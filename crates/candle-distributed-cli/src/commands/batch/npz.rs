//! Batches as arrays of NumPy, in the zip file that `numpy.load` reads.
//!
//! The indices of all batches are one array, and another has the place in it where each batch
//! begins and the last one ends: batches of different sizes are no rectangle.

use std::io::{self, Cursor, Write};

use candle_distributed::batch::Batch;
use zip::{CompressionMethod, DateTime, ZipWriter, write::SimpleFileOptions};

use crate::{
    error::{Error, Result},
    numbers::npy,
};

/// The file of these batches; with ranks there are the real tokens of the step of each.
pub(super) fn file(batches: &[&Batch], step_real_tokens: Option<Vec<u64>>) -> Result<Vec<u8>> {
    let mut offsets = vec![0];
    let mut indices = Vec::new();
    for batch in batches {
        indices.extend(&batch.indices);
        offsets.push(indices.len() as u64);
    }
    let mut arrays = vec![
        ("indices", indices),
        ("offsets", offsets),
        ("padded_length", batches.iter().map(|batch| batch.padded_length).collect()),
        ("real_tokens", batches.iter().map(|batch| batch.real_tokens).collect()),
    ];
    arrays.extend(step_real_tokens.map(|tokens| ("step_real_tokens", tokens)));
    for (name, array) in &arrays {
        if let Some(large) = array.iter().find(|&&number| i64::try_from(number).is_err()) {
            let limit = i64::MAX;
            return Err(Error::usage(format!(
                "{name} {large} is above the limit of {limit} of npz"
            )));
        }
    }
    Ok(zipped(&arrays)?)
}

fn zipped(arrays: &[(&str, Vec<u64>)]) -> io::Result<Vec<u8>> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, array) in arrays {
        let header = npy::header(&[array.len() as u64]);
        let n_bytes = header.len() as u64 + 8 * array.len() as u64;
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Stored)
            // The same batches are the same file at any time.
            .last_modified_time(DateTime::default())
            .large_file(n_bytes >= u64::from(u32::MAX));
        zip.start_file(format!("{name}.npy"), options)?;
        zip.write_all(&header)?;
        let bytes: Vec<u8> = array.iter().flat_map(|number| number.to_le_bytes()).collect();
        zip.write_all(&bytes)?;
    }
    Ok(zip.finish()?.into_inner())
}
