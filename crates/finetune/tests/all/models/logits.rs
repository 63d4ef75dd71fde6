//! Logits, losses and gradients.

use std::sync::Arc;

use candle_core::{IndexOp, Tensor, Var};
use dist_train::value_and_grad;
use finetune::models::Tokens;
use pmap_mesh::{DeviceMesh, Replica};
use serde_json::Value;

use crate::models::golden::{FAMILIES, Golden, MODELS, distance, ids, labels};

#[test]
fn logits_match_transformers() {
    for model in MODELS.into_iter().chain(FAMILIES) {
        let golden = Golden::open(model);
        let units = golden.units(&golden.variables());
        for batch in golden.expected["logits"].as_array().unwrap() {
            let rows = Golden::rows(&batch["input_ids"]);
            let tokens = Tokens::rows(ids(&rows));
            let logits = golden.decoder_for(rows[0].len()).logits(&units, &tokens).unwrap();
            for (row, mask) in Golden::rows(&batch["attention_mask"]).iter().enumerate() {
                let n = mask.iter().filter(|&&real| real == 1).count();
                let (found, expected) = if let Some(all) = batch["tensor"].as_str() {
                    (logits.i((row, ..n)), golden.tensors[all].i((row, ..n)))
                } else {
                    let last = batch["last_tensor"].as_str().unwrap();
                    (logits.i((row, n - 1)), golden.tensors[last].i(row))
                };
                let difference = distance(&found.unwrap(), &expected.unwrap());
                assert!(difference < 1e-5, "{model}: {difference}");
            }
        }
    }
}

#[test]
fn packed_logits_equal_separate_logits() {
    for model in MODELS.into_iter().chain(FAMILIES) {
        let golden = Golden::open(model);
        let units = golden.units(&golden.variables());
        let sequences = [vec![3_i64, 14, 15, 92, 65], vec![35, 89], vec![79, 32, 38]];
        let packed: Vec<i64> = sequences.concat();
        let segments = [1_i64, 1, 1, 1, 1, 2, 2, 3, 3, 3];
        let positions = [0_i64, 1, 2, 3, 4, 0, 1, 0, 1, 2];
        let row = |items: &[i64]| ids(&[items.to_vec()]);
        let tokens = Tokens::packed(row(&packed), row(&segments), row(&positions));
        let logits = golden.decoder.logits(&units, &tokens).unwrap();
        let mut start = 0;
        for sequence in sequences {
            let end = start + sequence.len();
            let separate = golden.decoder.logits(&units, &Tokens::rows(row(&sequence))).unwrap();
            let difference = distance(&logits.i((.., start..end)).unwrap(), &separate);
            assert!(difference < 2e-6, "{model}: {difference}");
            start = end;
        }
    }
}

#[test]
fn packed_rows_are_independent() {
    let golden = Golden::open("qwen2");
    let units = golden.units(&golden.variables());
    let rows = [[3_i64, 14, 15, 92, 65, 35], [79, 32, 38, 46, 26, 43]];
    let segments = [[1_i64, 1, 1, 1, 2, 2], [1, 1, 2, 2, 2, 0]];
    let positions = [[0_i64, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 0]];
    let both = |rows: [[i64; 6]; 2]| ids(&rows.map(|row| row.to_vec()));
    let tokens = Tokens::packed(both(rows), both(segments), both(positions));
    let logits = golden.decoder.logits(&units, &tokens).unwrap();
    for n in 0..2 {
        let one = |rows: [[i64; 6]; 2]| ids(&[rows[n].to_vec()]);
        let tokens = Tokens::packed(one(rows), one(segments), one(positions));
        let separate = golden.decoder.logits(&units, &tokens).unwrap();
        let difference = distance(&logits.i(n..=n).unwrap(), &separate);
        assert!(difference < 2e-6, "row {n}: {difference}");
    }
}

#[test]
fn losses_and_gradients_match_transformers() {
    for model in MODELS.into_iter().chain(FAMILIES) {
        let golden = Golden::open(model);
        let gradients = &golden.expected["gradients"];
        let tokens = Golden::rows(&golden.expected["logits"][0]["input_ids"]);
        assert_eq!(golden.expected["logits"][0]["tensor"], gradients["batch"]);
        let (loss, found) = differentiated(&golden, &tokens, &gradients["labels"]);
        assert!((loss - gradients["loss"].as_f64().unwrap()).abs() < 5e-6, "{model}: {loss}");
        let norms = gradients["norms"].as_object().unwrap();
        assert_eq!(norms.len(), found.len());
        let mut n_compared = 0;
        for (name, gradient) in found {
            let norm =
                gradient.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
            let difference = (f64::from(norm) - norms[&name].as_f64().unwrap()).abs();
            assert!(difference < 5e-6, "{model}: {name}: {difference}");
            let rows = format!("gradient_rows_256_272.{name}");
            let whole = golden.tensors.get(&format!("gradient.{name}"));
            let compared = match (whole, golden.tensors.get(&rows)) {
                (Some(expected), _) => (gradient, expected),
                (None, Some(expected)) => (gradient.i(256..272).unwrap(), expected),
                (None, None) => continue,
            };
            let difference = distance(&compared.0, compared.1);
            assert!(difference < 1e-6, "{model}: {name}: {difference}");
            n_compared += 1;
        }
        let named = golden.tensors.keys().filter(|name| name.starts_with("gradient"));
        assert_eq!(n_compared, named.count());
    }
}

#[test]
fn masked_losses_match_transformers() {
    for model in MODELS.into_iter().chain(FAMILIES) {
        let golden = Golden::open(model);
        let answers = &golden.expected["answer_only"];
        let tokens = Golden::rows(&answers["input_ids"]);
        let (loss, _) = differentiated(&golden, &tokens, &answers["labels"]);
        assert!((loss - answers["loss"].as_f64().unwrap()).abs() < 5e-6, "{model}: {loss}");
    }
}

#[test]
fn overlong_sequences_are_rejected() {
    let golden = Golden::open("llama");
    let units = golden.units(&golden.variables());
    let row = |len: i64| ids(&[(0..len).collect()]);
    let logits = |tokens: Tokens| golden.decoder.logits(&units, &tokens).map(drop);
    let rejected = |found: candle_core::Result<()>, length: usize| {
        let expected = format!("a sequence has {length} tokens, but the model has 128 positions");
        assert!(found.unwrap_err().to_string().contains(&expected));
    };
    logits(Tokens::rows(row(128))).unwrap();
    rejected(logits(Tokens::rows(row(129))), 129);
    // A packed row may be longer than its sequences.
    let segments = ids(&[(0..130).map(|n| n / 100).collect()]);
    let positions =
        |most: i64| ids(&[(0..130).map(|n| if n < 100 { n } else { most - 130 + n }).collect()]);
    logits(Tokens::packed(row(130), segments.clone(), positions(127))).unwrap();
    rejected(logits(Tokens::packed(row(130), segments, positions(129))), 129);
}

/// Returns the loss of a batch, and all gradients by name.
fn differentiated(
    golden: &Golden,
    tokens: &[Vec<i64>],
    targets: &Value,
) -> (f64, Vec<(String, Tensor)>) {
    let variables = golden.variables();
    let units = Arc::new(golden.units(&variables));
    let decoder = golden.decoder_for(tokens[0].len());
    let mesh = DeviceMesh::cpu(1).unwrap();
    let vars: Vec<Var> = variables.values().cloned().collect();
    let differentiate =
        value_and_grad(&mesh, vars, move |_: &Replica, (ids, labels): (Tensor, Tensor)| {
            decoder.loss(&units, &Tokens::rows(ids), &labels)
        });
    let targets = labels(&Golden::rows(targets));
    let (loss, gradients) = differentiate.call((ids(tokens), targets)).unwrap();
    let named =
        variables.iter().map(|(name, var)| (name.clone(), gradients.get(var).unwrap().clone()));
    (loss, named.collect())
}
