//! Measures reading: lines per second of padded batches, the index of a file, and its reopening.
//!
//! `cargo run --release -p data-loader --example throughput -- 200000`. With a file, a batch size
//! and a number of workers behind it, it prints only the rate of the second epoch, as JSON:
//! `benches/peers/data.py` compares it with PyTorch's.

#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::Path,
    time::Instant,
};

use core_types::{Epoch, Seed, files::AtomicFolder};
use data_loader::{
    BoxError, DataLoader, Dataset, IndexPlace, JsonlDataset, SampleBatch, TextDataset,
};

fn main() -> Result<(), BoxError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [n_lines, path, batch_size, n_workers] = &args[..] {
        let (batch_size, n_workers) = (batch_size.parse()?, n_workers.parse()?);
        let mut loader = padded_lines(Path::new(path), batch_size, n_workers)?;
        read_epoch(&mut loader, 0)?;
        let start = Instant::now();
        read_epoch(&mut loader, 1)?;
        let per_second = n_lines.parse::<f64>()? / start.elapsed().as_secs_f64();
        println!("{{\"lines_per_second\": {per_second:.0}, \"bytes\": {}}}", peak_bytes()?);
        return Ok(());
    }
    let n_lines: u64 = args.first().map_or("200000", String::as_str).parse()?;
    let folder = AtomicFolder::new(std::env::temp_dir().join("throughput"))?;
    let path = folder.path().join("lines.txt");
    write_lines(&path, n_lines, |n| format!("{}\n", "x".repeat(100 + (n * 7919 % 200) as usize)))?;
    for batch_size in [32, 256] {
        for n_workers in [0, 1, 2] {
            let start = Instant::now();
            let n_ids = read_epoch(&mut padded_lines(&path, batch_size, n_workers)?, 0)?;
            let per_second = n_lines as f64 / start.elapsed().as_secs_f64();
            println!(
                "batch {batch_size}, {n_workers} workers: {per_second:.0} lines/s ({n_ids} ids)"
            );
        }
    }
    let path = folder.path().join("lines.jsonl");
    write_lines(&path, n_lines * 5, |n| {
        format!("{{\"n\":{n},\"text\":\"{}\"}}\n", "x".repeat(970))
    })?;
    for name in ["built", "kept"] {
        let start = Instant::now();
        let first = first_batch(&path)?;
        let (bytes, seconds) = (fs::metadata(&path)?.len(), start.elapsed().as_secs_f64());
        println!(
            "{name} index: first batch of {first} in {seconds:.4} s, {:.2} GB/s",
            bytes as f64 / seconds / 1e9
        );
    }
    let index = fs::metadata(folder.path().join("lines.jsonl.line-index"))?.len();
    println!("index: {:.2} bytes a line", index as f64 / (n_lines * 5) as f64);
    Ok(())
}

fn write_lines(path: &Path, n: u64, line: impl Fn(u64) -> String) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    (0..n).try_for_each(|n| file.write_all(line(n).as_bytes()))?;
    file.flush()
}

/// Returns the peak memory of this process, as Linux reports it.
fn peak_bytes() -> Result<u64, BoxError> {
    let status = fs::read_to_string("/proc/self/status")?;
    let peak = status.split_once("VmHWM:").ok_or("no peak")?.1;
    Ok(peak.split_whitespace().next().ok_or("no number")?.parse::<u64>()? * 1024)
}

fn padded_lines(
    path: &Path,
    batch_size: u64,
    n_workers: usize,
) -> data_loader::Result<DataLoader<Vec<i64>>> {
    DataLoader::builder(TextDataset::open(path)?)
        .batch_size(batch_size)
        .shuffle(Seed::new(1))
        .num_workers(n_workers)
        .collate(|samples: SampleBatch<String>| Ok(pad(&samples.items)))
}

/// Returns the number of ids in an epoch.
fn read_epoch(loader: &mut DataLoader<Vec<i64>>, epoch: u64) -> data_loader::Result<u64> {
    loader.set_epoch(Epoch::new(epoch))?;
    let mut n_ids = 0;
    for batch in loader {
        n_ids += batch?.len() as u64;
    }
    Ok(n_ids)
}

/// Returns the bytes of all lines as 64-bit ids, padded to the longest.
fn pad(lines: &[String]) -> Vec<i64> {
    let width = lines.iter().map(String::len).max().unwrap_or(0);
    let mut ids = vec![0; width * lines.len()];
    for (row, line) in ids.chunks_mut(width.max(1)).zip(lines) {
        row.iter_mut().zip(line.bytes()).for_each(|(id, byte)| *id = byte.into());
    }
    ids
}

fn first_batch(path: &Path) -> Result<usize, BoxError> {
    #[derive(serde::Deserialize)]
    struct Record {
        text: String,
    }
    let records = JsonlDataset::<Record>::open_with(path, &IndexPlace::Beside)?;
    let texts = records.map(|record| Ok(record.text));
    let mut loader = DataLoader::builder(texts)
        .batch_size(32)
        .shuffle(Seed::new(1))
        .num_workers(2)
        .collate(|samples: SampleBatch<String>| Ok(samples.items.len()))?;
    loader.set_epoch(Epoch::ZERO)?;
    Ok(loader.next().ok_or("an epoch has a batch")??)
}
