//! Invalid input is rejected with a reason; unusual but valid input is planned.

use std::slice;

use core_types as types;
use fsdp_plan::{
    Cut, ElemType, Error, ParameterInfo, PlannedParameter, ShardingPlan,
    cost::{Collectives, CostModel},
    report::PlanReport,
    reshard::Reshard,
    strategy::{Choice, Full, Hsdp, Hybrid, LayerWise, Layout, ShardingStrategy, WholeTensor},
};

use crate::plans::inputs::{f32_parameter, full, rank, world};

fn strategies() -> Vec<Box<dyn ShardingStrategy>> {
    vec![
        Box::new(Full::default()),
        Box::new(LayerWise::default()),
        Box::new(WholeTensor),
        Box::new(Hybrid::default()),
        Box::new(Full::new(Layout::Flat)),
    ]
}

fn build(cuts: &[(ParameterInfo, Cut)]) -> Result<ShardingPlan, Error> {
    let planned =
        cuts.iter().map(|(info, cut)| PlannedParameter::new(info.clone(), *cut)).collect();
    ShardingPlan::new("test", world(2), planned)
}

/// Checks that an error is about the cut of a parameter, with these words.
fn rejects_cut(error: &Error, at_fault: &str, words: &str) {
    assert!(
        matches!(error, Error::InvalidCut { name, reason } if name == at_fault && reason.contains(words)),
        "{error}"
    );
}

#[test]
fn empty_lists_are_rejected() {
    for strategy in strategies() {
        assert_eq!(strategy.plan(&[], world(2)), Err(Error::NoParameters));
    }
}

#[test]
fn duplicate_names_are_rejected() {
    let parameters = [f32_parameter("a", &[1]), f32_parameter("b", &[1]), f32_parameter("a", &[2])];
    for strategy in strategies() {
        let error = strategy.plan(&parameters, world(2)).unwrap_err();
        assert_eq!(error.to_string(), "parameter a is listed twice");
    }
}

#[test]
fn scalars_cannot_be_cut_along_dim_0() {
    let scalar = f32_parameter("scale", &[]);
    let error = Full::default().plan(slice::from_ref(&scalar), world(2)).unwrap_err();
    assert_eq!(error, Error::Scalar { name: "scale".into() });
    assert!(error.to_string().contains("gather it always, use the flat layout"));

    for alternative in [
        full(&[scalar.clone().with_always_gather(true)], 2),
        Full::new(Layout::Flat).plan(slice::from_ref(&scalar), world(2)).unwrap(),
        LayerWise::default().plan(&[scalar], world(2)).unwrap(),
    ] {
        let shard = alternative.shard(0, rank(0, 2)).unwrap().unwrap();
        assert_eq!((shard.shard_size, shard.dim0_rows), (1, None));
    }
}

#[test]
fn empty_parameters_have_no_owner() {
    let parameters =
        [[0, 4], [4, 0]].map(|shape| f32_parameter(&format!("empty{}", shape[0]), &shape));
    for strategy in strategies() {
        let plan = strategy.plan(&parameters, world(3)).unwrap();
        assert_eq!(plan.parameters().len(), 2);
        for place in world(3).placements() {
            assert_eq!(
                plan.shards_of_rank(place.rank()).unwrap().count(),
                0,
                "{}",
                strategy.name()
            );
        }
        let cost = plan.cost(&CostModel::default()).unwrap();
        assert!(cost.ranks.iter().all(|rank| rank.total_bytes() == 0));
        assert!((cost.max_over_mean - 1.0).abs() < f64::EPSILON);
        assert_eq!(cost.collectives, Collectives::default());
    }
}

#[test]
fn overflowing_sums_are_rejected() {
    let parameters =
        ["a", "b"].map(|name| ParameterInfo::new(name, [u64::MAX], ElemType::U8).unwrap());
    let cost = full(&parameters, 1).cost(&CostModel::default());
    assert!(matches!(cost, Err(Error::TotalTooLarge { .. })), "{cost:?}");
    let flat = Full::new(Layout::Flat).plan(&parameters, world(2));
    assert_eq!(flat, Err(Error::TotalTooLarge { what: "the parameters of a unit" }));
    // Each rank stores a row for the one that rank 0 owns, so the padded buffer is 2^20 times as large as the
    // parameter.
    let wide = ParameterInfo::new("wide", [1, 1 << 60], ElemType::U8).unwrap();
    let cost = full(&[wide], 1 << 20).cost(&CostModel::default());
    assert_eq!(cost, Err(Error::TotalTooLarge { what: "the bytes gathered at the same time" }));
}

#[test]
fn flat_units_reject_mixed_parameters() {
    let first = f32_parameter("h.0.a", &[2]);
    let half = ParameterInfo::new("h.0.b", [2], ElemType::Bf16).unwrap();
    let frozen = f32_parameter("h.0.b", &[2]).with_requires_grad(false);
    for (second, expected) in [(half, "dtype"), (frozen, "whether they are trained")] {
        let error =
            Full::new(Layout::Flat).plan(&[first.clone(), second.clone()], world(2)).unwrap_err();
        rejects_cut(&error, "h.0.b", &format!("differs from h.0.a in {expected}"));
        let separate = [first.clone(), second.with_unit("other")];
        assert!(Full::new(Layout::Flat).plan(&separate, world(2)).is_ok());
    }
}

#[test]
fn contradictory_cuts_are_rejected() {
    let info = f32_parameter("a", &[3]);
    let gathered = info.clone().with_always_gather(true);
    let error = build(&[(gathered, Cut::Dim0)]).unwrap_err();
    rejects_cut(&error, "a", "must always be gathered, but the plan cuts it");
    let foreign = build(&[(info.clone(), Cut::Whole { owner: rank(2, 3) })]);
    assert!(
        matches!(foreign, Err(Error::World(types::Error::RankOutOfRange { rank: 2, .. }))),
        "{foreign:?}"
    );

    let flat = |offset, unit_numel| Cut::Flat { offset, unit_numel };
    let other = f32_parameter("b", &[2]);
    for (cuts, at_fault) in [
        ([flat(1, 5), flat(4, 5)], "a"),
        ([flat(0, 5), flat(2, 5)], "b"),
        ([flat(0, 5), flat(3, 6)], "b"),
        ([flat(0, 6), flat(3, 6)], "b"),
        ([flat(0, 2), flat(2, 2)], "a"),
        ([flat(u64::MAX, 5), flat(3, 5)], "a"),
    ] {
        let built = build(&[(info.clone(), cuts[0]), (other.clone(), cuts[1])]);
        rejects_cut(&built.unwrap_err(), at_fault, "is at offset");
    }
    assert!(build(&[(info, flat(0, 5)), (other, flat(3, 5))]).is_ok());
}

#[test]
fn unknown_ranks_and_parameters_are_errors() {
    let plan = full(&[f32_parameter("a", &[8])], 2);
    let no_rank = Error::World(types::Error::RankOutOfRange { rank: 2, world_size: world(2) });
    assert_eq!(plan.shard(0, rank(2, 3)).err(), Some(no_rank.clone()));
    assert_eq!(
        plan.shard(1, rank(0, 2)).err(),
        Some(Error::Unknown { what: "parameter", name: "1 of 1".into() })
    );
    assert_eq!(plan.shards_of_rank(rank(2, 3)).err(), Some(no_rank));
    let report = PlanReport::new(&plan, &CostModel::default(), Some(rank(2, 3)));
    assert!(matches!(report, Err(Error::World(types::Error::RankOutOfRange { rank: 2, .. }))));
}

#[test]
fn deserialized_plans_are_checked() {
    let json =
        serde_json::to_string(&full(&[f32_parameter("a", &[3]), f32_parameter("b", &[3])], 2))
            .unwrap();
    let read = |from: &str, to: &str| {
        assert!(json.contains(from), "{json}");
        serde_json::from_str::<ShardingPlan>(&json.replacen(from, to, 1))
            .map_err(|error| error.to_string())
    };
    assert!(read("", "").is_ok());
    for (from, to, reason) in [
        (
            r#""format_version":1"#,
            r#""format_version":2"#,
            "plan format version 2 is not supported",
        ),
        (r#""world_size":2"#, r#""world_size":0"#, "world size 0 is out of range"),
        (r#""name":"b""#, r#""name":"a""#, "parameter a is listed twice"),
        ("[3]", "[]", "parameter a has no dims"),
        ("[3]", "[18446744073709551615]", "parameter a of shape [18446744073709551615]"),
        ("F32", "F31", "tensor a has unknown dtype \"F31\""),
        (
            r#""cut":"dim0""#,
            r#""cut":{"whole":{"owner":2}}"#,
            "rank 2 is out of range for a world of 2",
        ),
        (r#""cut":"dim0""#, r#""cut":"dim1""#, "unknown variant `dim1`"),
        ("{", r#"{"shares":{"total":3,"runs":[[1,0],[3,1]]},"#, "a plan with unequal `shares`"),
    ] {
        let error = read(from, to).unwrap_err();
        assert!(error.starts_with(reason), "{error}");
    }
}

#[test]
fn parameters_round_trip_through_json() {
    let infos = [
        f32_parameter("h.1.a", &[4])
            .with_layer_pattern(&"h".parse().unwrap())
            .with_unit("together"),
        f32_parameter("h.1.b", &[4]).with_requires_grad(false).with_always_gather(true),
        ParameterInfo::new("h.1.c", [], ElemType::F8E4M3).unwrap(),
        ParameterInfo::new("h.1.d", [2], ElemType::Bool).unwrap().with_requires_grad(true),
    ];
    let plan = Full::new(Layout::Flat).plan(&infos[..3], world(2));
    assert!(plan.is_ok(), "{plan:?}");
    for info in infos {
        let json = serde_json::to_string(&info).unwrap();
        assert_eq!(serde_json::from_str::<ParameterInfo>(&json).unwrap(), info, "{json}");
    }
}

#[test]
fn hybrid_handles_unmatched_lists() {
    let parameters =
        [f32_parameter("transformer.h.0.w", &[4]), f32_parameter("classifier.w", &[4])];
    let cuts = |strategy: &Hybrid| {
        let plan = strategy.plan(&parameters, world(2)).unwrap();
        [0, 1].map(|position: usize| matches!(plan.parameters()[position].cut(), Cut::Dim0))
    };
    assert_eq!(cuts(&Hybrid::default()), [true, false]);
    assert_eq!(cuts(&Hybrid::new([""; 0], [""; 0]).unwrap()), [true, true]);
    assert_eq!(cuts(&Hybrid::new([""; 0], ["transformer", "classifier"]).unwrap()), [false, false]);
    assert_eq!(cuts(&Hybrid::new(["h.0"], ["transformer", "classifier"]).unwrap()), [true, false]);
    assert_eq!(cuts(&Hybrid::new([""; 0], ["class", "h.1", "trans"]).unwrap()), [true, true]);
}

#[test]
fn ties_are_checked() {
    let embedding = f32_parameter("wte.weight", &[5, 2]);
    let tied = |name: &str, shape: &[u64], to: &str| f32_parameter(name, shape).with_tied_to(to);
    for strategy in strategies() {
        let plan = strategy
            .plan(&[embedding.clone(), tied("lm_head.weight", &[5, 2], "wte.weight")], world(2))
            .unwrap();
        assert_eq!(plan.parameters()[1].cut(), Cut::Tied, "{}", strategy.name());
        assert_eq!(plan.numel(), 10);
        let owned: u64 = plan
            .cost(&CostModel::default())
            .unwrap()
            .ranks
            .iter()
            .map(|rank| rank.param_bytes)
            .sum();
        assert_eq!(owned, 40);
        for (second, reason) in [
            (tied("b", &[5, 2], "c"), "there is no such parameter"),
            (tied("b", &[5, 2], "b"), "the target is tied"),
            (tied("b", &[2, 5], "wte.weight"), "they differ in shape or dtype"),
            (tied("h.0.b", &[5, 2], "wte.weight"), "they are in different units"),
        ] {
            let error = strategy.plan(&[embedding.clone(), second], world(2)).unwrap_err();
            assert!(error.to_string().contains(&format!(": {reason}")), "{error}");
        }
    }
    let untied = build(&[(embedding.clone(), Cut::Tied)]).unwrap_err();
    rejects_cut(&untied, "wte.weight", "is untied, but the plan treats it as tied");
    let cut = build(&[(embedding, Cut::Dim0), (tied("b", &[5, 2], "wte.weight"), Cut::Dim0)]);
    rejects_cut(&cut.unwrap_err(), "b", "is tied, but the plan treats it as untied");
}

#[test]
fn dtype_blocks_are_never_cut() {
    let block = |name: &str, shape: &[u64], dtype| ParameterInfo::new(name, shape, dtype);
    let partial = block("a", &[3], ElemType::F4);
    assert!(matches!(partial, Err(Error::InvalidParameter { .. })), "{partial:?}");
    let rows = block("rows", &[6, 64], ElemType::Q4_0).unwrap();
    let column = block("column", &[64, 3], ElemType::F4).unwrap();
    let by_rows = full(slice::from_ref(&rows), 3).cost(&CostModel::default()).unwrap();
    assert_eq!(by_rows.ranks.iter().map(|rank| rank.param_bytes).collect::<Vec<_>>(), [72; 3]);
    for layout in [Layout::Dim0, Layout::Flat, Layout::FlatAligned] {
        let error = Full::new(layout).plan(slice::from_ref(&column), world(2)).unwrap_err();
        rejects_cut(&error, "column", "use a ragged layout");
    }
    for layout in [Layout::ROWS, Layout::BlockRagged { block: 3 }] {
        let plan = Full::new(layout).plan(&[rows.clone(), column.clone()], world(5)).unwrap();
        for place in world(5).placements() {
            for (parameter, shard) in plan.shards_of_rank(place.rank()).unwrap() {
                let block_numel = parameter.info().dtype().block_numel();
                assert_eq!(
                    (shard.start_offset % block_numel, shard.shard_size % block_numel),
                    (0, 0),
                    "{plan:?}"
                );
            }
        }
    }
    let granule =
        |granule, round_up_from| Cut::Ragged { offset: 0, unit_bytes: 216, granule, round_up_from };
    for (bytes, round_up_from) in [(0, 0), (18, 0), (18, 19), (20, 1)] {
        let built = build(&[(rows.clone(), granule(bytes, round_up_from))]);
        rejects_cut(&built.unwrap_err(), "rows", "has invalid granules");
    }
    assert!(build(&[(rows, granule(36, 36))]).is_ok());
}

#[test]
fn zero_counts_are_rejected() {
    let parameters = [f32_parameter("a", &[4, 4])];
    for layout in [Layout::RowRagged { rows: 0 }, Layout::BlockRagged { block: 0 }] {
        assert!(matches!(Full::new(layout).plan(&parameters, world(2)), Err(Error::Zero { .. })));
    }
    for (replicas, world_size) in [(0, 4), (3, 4), (8, 4)] {
        let plan = Hsdp::new(Full::default(), replicas).plan(&parameters, world(world_size));
        assert_eq!(plan, Err(Error::ReplicaMismatch { world_size, replicas }));
    }
    assert_eq!(
        full(&parameters, 2).with_kept_units(["h.9"]),
        Err(Error::Unknown { what: "unit", name: "h.9".into() })
    );
}

#[test]
fn resharding_rejects_parameter_mismatches() {
    let plan = |parameters: &[ParameterInfo]| full(parameters, 2);
    let a = f32_parameter("a", &[4]);
    let b = f32_parameter("b", &[4]);
    let from = plan(&[a.clone(), b.clone()]);
    for (to, name) in [
        (plan(&[b.clone(), a.clone()]), "b"),
        (plan(&[a.clone(), f32_parameter("b", &[5])]), "b"),
        (plan(slice::from_ref(&a)), "b"),
        (plan(&[a, b, f32_parameter("c", &[4])]), "c"),
    ] {
        let error = Reshard::new(&from, &to).unwrap_err();
        assert!(
            matches!(&error, Error::ParameterMismatch { name: found, .. } if found == name),
            "{error}"
        );
    }
}

#[test]
fn unknown_names_are_reported() {
    let plan = full(&[f32_parameter("w", &[4])], 2);
    let unknown = Error::Unknown { what: "parameter", name: "v".into() };
    assert_eq!(plan.explain_parameter("v"), Err(unknown));
    assert!(plan.explain_parameter("w").is_ok());
    let bad = Hybrid::default().with_rule("a.[", Choice::Replicate);
    assert!(matches!(bad, Err(Error::InvalidPattern { pattern, .. }) if pattern == "a.["));
}

#[test]
fn rules_are_limited_in_number_and_length() {
    const MAX_RULES: usize = 4096;
    const MAX_BYTES: usize = 4096;
    const MAX_PATTERN_BYTES: usize = 1 << 20;
    let none = Hybrid::new([], []).unwrap();
    let add = |hybrid: Hybrid, n: usize, pattern: &str| {
        (0..n).try_fold(hybrid, |hybrid, _| hybrid.with_rule(pattern, Choice::Replicate))
    };
    let full = add(none.clone(), MAX_RULES, "a").unwrap();
    let too_many = Error::TooManyRules { what: "rules", max: MAX_RULES };
    assert_eq!(full.clone().with_rule("b", Choice::Replicate), Err(too_many.clone()));
    let long = "a".repeat(MAX_BYTES);
    let n_long = MAX_PATTERN_BYTES / MAX_BYTES;
    let longest = add(none, n_long, &long).unwrap();
    let too_long =
        Error::TooManyRules { what: "bytes in the patterns of the rules", max: MAX_PATTERN_BYTES };
    assert_eq!(longest.clone().with_rule("b", Choice::Replicate), Err(too_long.clone()));

    for (hybrid, error) in [(full, too_many), (longest, too_long)] {
        let json = serde_json::to_string(&hybrid).unwrap();
        assert_eq!(serde_json::from_str::<Hybrid>(&json).unwrap(), hybrid);
        let more = json.replacen("[{", r#"[{"pattern": "b", "choice": "replicate"}, {"#, 1);
        let refused = serde_json::from_str::<Hybrid>(&more).unwrap_err();
        assert!(refused.to_string().starts_with(&error.to_string()), "{refused}");
    }
}
