//! How little padding the batcher leaves: figures that only a change of the rules may change, and the ones promised.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;

use candle_distributed::batch::{Buckets, Cost, Cut, Packing, StepLayout};
use integration_tests::{
    lengths::{self, ALL},
    padding::{
        N, ROW_LENGTHS, efficiency_of, fewest_batches, fewest_rows, imbalance, other_rules,
        pairs_met_again, report, rows, sorted, tables, waiting,
    },
};

/// The tables that the bench prints, for streams of this length.
#[test]
fn figures_are_as_recorded() {
    for (name, table) in tables(100_000) {
        insta::assert_snapshot!(name, table);
    }
}

#[test]
fn the_optimal_cut_makes_the_fewest_batches_and_no_more_padding_than_fairseq() {
    // What `batch_by_size` of fairseq 0.12 reaches with the same budgets, at a multiple of 1.
    let fairseq = BTreeMap::from([
        ("web", 0.9972),
        ("squad", 0.9941),
        ("imdb", 0.9944),
        ("sft32k", 0.9945),
        ("speech", 0.9993),
    ]);
    for (name, recipe, budget) in ALL {
        let lengths = recipe.draw(N);
        let optimal = report(&lengths, sorted(None, Cut::Optimal), budget);
        assert_eq!(optimal.batches, fewest_batches(&lengths, budget), "{name}");
        assert!(
            optimal.efficiency() >= fairseq.get(name).copied().unwrap_or(0.0),
            "{name}: {optimal}"
        );
    }
}

#[test]
fn windows_come_close_to_the_whole() {
    for (name, recipe, budget) in ALL {
        let stream = recipe.draw(400_000);
        let fewest = fewest_batches(&stream, budget) as f64;
        for (window, efficiency, more) in [(128, 0.975, 1.03), (256, 0.985, 1.015)] {
            let report = report(&stream, sorted(Some(window), Cut::Greedy), budget);
            assert!(report.efficiency() >= efficiency, "{name} {window}: {report}");
            assert!(
                report.batches as f64 <= more * fewest,
                "{name} {window}: {report}, {fewest} at best"
            );
        }
    }
}

#[test]
fn companions_change_from_epoch_to_epoch() {
    let (lengths, window) = (lengths::WEB.draw(200_000), 26);
    // 128 batches of a million sequences are as large a share of the epoch.
    let share = pairs_met_again(&lengths, window, 16_384);
    assert!(share <= 0.005, "{share}");
}

#[test]
fn optimal_boundaries_pad_least() {
    for (name, recipe, _) in ALL {
        let lengths = recipe.draw(N);
        let optimal = efficiency_of(&Buckets::optimal(&lengths, 32).unwrap(), &lengths);
        for (rule, buckets) in other_rules(&lengths, 32) {
            let other = efficiency_of(&buckets, &lengths);
            assert!(optimal > other || optimal >= 1.0, "{name}: {optimal} by {other} with {rule}");
        }
    }
}

#[test]
fn packing_comes_close_to_the_fewest_rows() {
    for ((name, recipe, _), row_lengths) in ALL.into_iter().zip(ROW_LENGTHS) {
        let lengths = recipe.draw(N);
        for &row_length in row_lengths {
            let (fewest, best_fit) =
                (fewest_rows(&lengths, row_length), rows(&lengths, row_length, Packing::BestFit));
            let packed = rows(&lengths, row_length, Packing::MinimumSlack);
            let most = if (name, row_length) == ("speech", 4096) { 1.021 } else { 1.005 };
            assert!(packed <= best_fit, "{name} {row_length}: {packed}, {best_fit} by best fit");
            assert!(
                packed as f64 <= most * fewest as f64,
                "{name} {row_length}: {packed}, {fewest} at best"
            );
        }
    }
}

#[test]
fn ranks_hardly_wait_for_each_other() {
    for (name, most) in [("web", 0.005), ("sft32k", 0.015), ("speech", 0.003)] {
        let (_, recipe, budget) = ALL.into_iter().find(|set| set.0 == name).unwrap();
        let dealt = waiting(&recipe.draw(N), StepLayout::Dealt, Cost::ATTENTION, budget);
        assert!(dealt.attention <= most, "{name}: {dealt:?}");
    }
    for (name, recipe, _) in ALL {
        let imbalance = imbalance(&recipe.draw(N));
        assert!(imbalance <= 1e-4, "{name}: {imbalance}");
    }
}
