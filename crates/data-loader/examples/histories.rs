//! Checks that random histories of loaders lose no sample and read none twice.
//!
//! `cargo run --release -p data-loader --example histories -- 10000`

#![allow(clippy::print_stdout, reason = "an example prints its results")]

#[path = "../tests/all/histories.rs"]
mod histories;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let n: u64 = std::env::args().nth(1).as_deref().unwrap_or("10000").parse()?;
    for number in 0..n {
        histories::check_history(number);
    }
    println!("{n} histories keep every sample");
    Ok(())
}
