//! Tables of the padding that the batcher leaves; only a change of its rules may change them.

use integration_tests::padding::tables;

#[test]
fn tables_match_their_snapshots() {
    for (name, table) in tables(100_000) {
        insta::assert_snapshot!(name, table);
    }
}
