//! How little padding the batcher leaves, as tables that only a change of the rules may change.

use integration_tests::padding::tables;

/// The tables that the bench prints, for streams of this length.
#[test]
fn figures_are_as_recorded() {
    for (name, table) in tables(100_000) {
        insta::assert_snapshot!(name, table);
    }
}
