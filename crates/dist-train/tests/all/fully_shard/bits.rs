//! Bitwise equal losses and parameters.

use dist_train::{Keep, ModelBuilder, Units};
use fsdp_plan::strategy::{Full, LayerWise, Layout, ShardingStrategy};
use pmap_mesh::DeviceMesh;

use super::model::{KEEPS, adam, data_parallel, sharded, strategies, train, train_plain};

const STEPS: usize = 4;

#[test]
fn every_layout_equals_plain_candle() {
    for slots in [1, 3, 4] {
        let rows = 2 * slots;
        let mesh = DeviceMesh::cpu(slots).unwrap();
        let expected = train_plain(slots, rows, STEPS);
        let check = |builder: ModelBuilder<'_, Units>, what: &str| {
            let found = train(builder.build(adam).unwrap(), rows, STEPS);
            assert_eq!(found, expected, "{what}, {slots} slots");
        };
        check(data_parallel(&mesh), "replicated");
        for keep in KEEPS {
            let builder = || sharded(&mesh).keep(keep);
            for (name, strategy) in strategies() {
                check(builder().strategy(strategy), &format!("{keep:?}, {name}"));
            }
            for prefetch in [0, 1, 2, usize::MAX] {
                let what = format!("{keep:?}, {prefetch} ahead");
                check(builder().prefetch(prefetch), &what);
                check(builder().prefetch(prefetch).optimizer_in_backward(), &what);
            }
        }
        let ragged = Full::new(Layout::BlockRagged { block: 4 });
        let cuts: [Box<dyn ShardingStrategy>; 2] =
            [Box::new(LayerWise::default()), Box::new(ragged)];
        for strategy in cuts {
            let builder = sharded(&mesh).strategy(strategy).keep(Keep::Inputs);
            check(builder.optimizer_in_backward(), "in the backward pass");
        }
    }
}
