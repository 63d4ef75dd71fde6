//! Bitwise equal losses and parameters.

use dist_train::{Keep, ModelBuilder, Units};
use fsdp_plan::strategy::{Choice, Full, Hsdp, Hybrid, LayerWise, Layout, ShardingStrategy};
use pmap_mesh::DeviceMesh;

use super::model::{KEEPS, adam, data_parallel, sharded, strategies, train, train_plain};

const STEPS: usize = 4;

#[test]
fn every_layout_equals_plain_candle() {
    for slots in [1, 3] {
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
            for prefetch in [0, 1, usize::MAX] {
                let what = format!("{keep:?}, {prefetch} ahead");
                check(builder().prefetch(prefetch), &what);
                check(builder().prefetch(prefetch).optimizer_in_backward(), &what);
            }
        }
        for (name, strategy) in strategies() {
            check(sharded(&mesh).strategy(strategy), name);
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

#[test]
fn replica_groups_have_equal_bits() {
    let mesh = DeviceMesh::builder().axis("replicas", 2).axis("shards", 2).cpu().unwrap();
    let trained = |configure: fn(ModelBuilder<'_, Units>) -> ModelBuilder<'_, Units>| {
        let hybrid = Hybrid::default().with_rule("{norm,mix}", Choice::Replicate).unwrap();
        let builder = sharded(&mesh).strategy(Hsdp::new(hybrid, 2));
        train(configure(builder).build(adam).unwrap(), 8, STEPS)
    };
    let expected = trained(|builder| builder);
    assert_eq!(trained(|builder| builder.keep(Keep::Graph)), expected);
    assert_eq!(trained(|builder| builder.keep(Keep::Gathered)), expected);
    assert_eq!(trained(|builder| builder.prefetch(2)), expected);
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method has one lifetime")]
    let in_backward = trained(|builder| builder.optimizer_in_backward());
    assert_eq!(in_backward, expected);
}
