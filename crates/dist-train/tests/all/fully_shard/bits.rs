//! Losses and parameters to the bit.

use pmap_mesh::DeviceMesh;

use super::model::{KEEPS, adam, data_parallel, sharded, train, train_plain};

const STEPS: usize = 20;

#[test]
fn twenty_steps_have_the_bits_of_data_parallel_and_of_plain_candle() {
    for slots in 1..5 {
        let rows = 2 * slots;
        let mesh = DeviceMesh::cpu(slots).unwrap();
        let expected = train_plain(slots, rows, STEPS);
        let found = train(data_parallel(&mesh).build(adam).unwrap(), rows, STEPS);
        assert_eq!(found, expected, "data parallel, {slots} slots");
        for keep in KEEPS {
            let model = sharded(&mesh).keep(keep).build(adam).unwrap();
            assert_eq!(train(model, rows, STEPS), expected, "{keep:?}, {slots} slots");
        }
    }
}
