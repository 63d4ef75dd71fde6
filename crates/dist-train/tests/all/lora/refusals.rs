//! Rejected adapters.

use std::fs;

use candle_core::DType;
use candle_nn::{VarBuilder, linear};
use dist_train::{DataParallel, Error, FullyShard, Lora, PretrainedFiles, UnitRules, Units};
use pmap_mesh::DeviceMesh;

use super::{lora, model, sgd, whole};

/// Returns the error of building a model with adapters, which both layouts share.
#[track_caller]
fn refused(lora: &Lora) -> String {
    let mesh = DeviceMesh::cpu(1).unwrap();
    let built =
        DataParallel::builder(&mesh, lora.adapt(model)).by_units(UnitRules::new()).build(sgd);
    let whole = built.map(drop).unwrap_err().to_string();
    let built = FullyShard::builder(&mesh, lora.adapt(model)).build(sgd);
    assert_eq!(built.map(drop).unwrap_err().to_string(), whole);
    whole
}

#[test]
fn unfit_targets_are_named() {
    let lora = |targets: &[&str]| Lora::new(targets.iter().copied(), 2, 3.0).unwrap();
    let text = refused(&lora(&["up", "p", "h.0.down", "mlp"]));
    assert!(text.ends_with("no linear layer of the model is named p, h.0.down, mlp"), "{text}");
    let built = |lora: Lora, build: fn(VarBuilder<'_>) -> candle_core::Result<()>| {
        let mesh = DeviceMesh::cpu(1).unwrap();
        DataParallel::builder(&mesh, lora.adapt(build))
            .by_units(UnitRules::new())
            .build(sgd)
            .map(drop)
    };
    let norm = built(lora(&["norm"]), |vb| vb.get(4, "norm.weight").map(drop));
    let text = norm.unwrap_err().to_string();
    assert!(text.ends_with("norm has the shape [4], adapters are for matrices"), "{text}");
    // A suffix that begins after a dot, or the full name.
    for target in ["h.0.up", "0.up", "up"] {
        built(lora(&[target]), |vb| linear(2, 2, vb.pp("h.0.up")).map(drop)).unwrap();
    }
}

#[test]
fn invalid_settings_are_rejected() {
    for (rank, alpha) in [(0, 1.0), (1, 0.0), (1, -1.0), (1, f64::NAN), (1, f64::INFINITY)] {
        assert!(matches!(Lora::new(["up"], rank, alpha), Err(Error::Setting { .. })), "{alpha}");
    }
    let none = Lora::new([""; 0], 1, 1.0).map(drop);
    assert!(matches!(none, Err(Error::Lora { .. })), "{none:?}");
}

#[test]
fn unfit_adapter_files_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let lora = lora();
    whole(&DeviceMesh::cpu(1).unwrap(), &lora)
        .save_pretrained(folder.path(), lora.adapters())
        .unwrap();
    let path = folder.path().join("adapter_config.json");
    let config = fs::read_to_string(&path).unwrap();
    let with = |from: &str, to: &str| {
        assert!(config.contains(from), "{config}");
        fs::write(&path, config.replace(from, to)).unwrap();
    };

    // Ranks and layers that do not match the tensors.
    with("\"r\": 2", "\"r\": 3");
    let text = refused(&Lora::open(folder.path()).unwrap());
    assert!(text.contains("has shape [2, 4], expected [3, 4]"), "{text}");
    with("\"up\"", "\"down\"");
    let text = refused(&Lora::open(folder.path()).unwrap());
    assert!(text.contains("4 of 4 parameters are missing (h.0.mlp.down.lora_A.weight"), "{text}");

    let others = ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga"].map(|way| {
        let field = format!("\"r\": 2, \"init_lora_weights\": \"{way}\"");
        (field, format!("init_lora_weights is \"{way}\", a way that leaves the weights as"))
    });
    for (to, expected) in &others {
        with("\"r\": 2", to);
        let text = Lora::open(folder.path()).map(drop).unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    }
    for way in ["null", "true", "false", "\"gaussian\"", "\"eva\"", "\"orthogonal\""] {
        with("\"r\": 2", &format!("\"r\": 2, \"init_lora_weights\": {way}"));
        assert_eq!(Lora::open(folder.path()).unwrap().adapters(), lora.adapters());
    }
    // Dropout affects only training.
    with("\"lora_dropout\": 0.0", "\"lora_dropout\": 0.1");
    assert_eq!(Lora::open(folder.path()).unwrap().adapters(), lora.adapters());

    for (from, to, expected) in [
        ("\"bias\": \"none\"", "\"bias\": \"all\"", "bias is \"all\", \"none\" was expected"),
        ("\"peft_type\": \"LORA\"", "\"peft_type\": \"LOHA\"", "peft_type is \"LOHA\", \"LORA\""),
        ("\"r\": 2", "\"r\": 2, \"use_dora\": true", "use_dora is true, nothing was expected"),
        ("\"r\": 2", "\"r\": -2", "r is -2, a whole number was expected"),
        ("\"lora_alpha\": 3.0", "\"lora_alpha\": null", "lora_alpha is null, a number was"),
        ("\"up\"", "7", "target_modules is [7], a list of names of layers was expected"),
        ("{", "[", "a JSON object was expected"),
    ] {
        with(from, to);
        let text = Lora::open(folder.path()).map(drop).unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    }
    fs::remove_file(&path).unwrap();
    let text = Lora::open(folder.path()).map(drop).unwrap_err().to_string();
    assert!(text.contains("adapter_config.json"), "{text}");
}

#[test]
fn missing_adapters_cannot_be_saved() {
    let mesh = DeviceMesh::cpu(1).unwrap();
    let model = DataParallel::builder(&mesh, model).build(sgd).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for files in [lora().adapters(), lora().merged()] {
        let saved = model.save_pretrained(folder.path(), files);
        assert!(matches!(saved, Err(Error::Lora { .. })));
    }
    model.save_pretrained(folder.path(), PretrainedFiles::default()).unwrap();
}

#[test]
fn mismatched_adapters_are_not_saved() {
    let mesh = DeviceMesh::cpu(1).unwrap();
    let adapted = Lora::new(["up", "down"], 2, 3.0).unwrap();
    let layers =
        |vb: VarBuilder<'_>| Ok((linear(4, 4, vb.pp("0.up"))?, linear(4, 4, vb.pp("1.down"))?));
    let builder = DataParallel::builder(&mesh, adapted.adapt(layers)).by_units(UnitRules::new());
    let model = builder.build(sgd).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (targets, rank, expected) in [
        (&["up"][..], 2, "1.down has an adapter, and no target names it"),
        (&["up", "down", "out"], 2, "no linear layer of the model is named out"),
        (
            &["up", "down"],
            8,
            "0.up.lora_A.weight has the shape [2, 4], which does not fit adapters of LoRA rank 8",
        ),
    ] {
        let lora = Lora::new(targets.iter().copied(), rank, 3.0).unwrap();
        for files in [lora.adapters(), lora.merged()] {
            let error = model.save_pretrained(folder.path(), files).unwrap_err().to_string();
            assert!(error.ends_with(expected), "{error}");
        }
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let lora = Lora::new(["up", "1.down"], 2, 3.0).unwrap();
    model.save_pretrained(folder.path(), lora.adapters()).unwrap();
}

#[test]
fn half_precision_sums_are_rejected() {
    let (mesh, lora) = (DeviceMesh::cpu(1).unwrap(), lora());
    for (dtype, name) in [(DType::BF16, "bf16"), (DType::F16, "f16")] {
        let builder = DataParallel::builder(&mesh, lora.adapt(model)).by_units(UnitRules::new());
        let text = builder.dtype(dtype).build(sgd).map(drop).unwrap_err().to_string();
        assert!(text.contains(&format!("h.0.mlp.up is of {name}, in which the effect")), "{text}");
    }
}

#[test]
fn unused_adapters_fail_the_step() {
    let lora = lora();
    let mut model = whole(&DeviceMesh::cpu(1).unwrap(), &lora);
    let without = model.step(super::batch(0), |_: &pmap_mesh::Replica, model: &Units, mut x| {
        for n in 0..super::BLOCKS {
            x = model.unit(&format!("h.{n}"), &x, super::block)?;
        }
        super::loss(&x)
    });
    let text = without.map(drop).unwrap_err().to_string();
    assert!(text.contains("lora_"), "{text}");
}
