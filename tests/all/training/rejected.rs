//! A model with layers without a backward fails in its first step.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use candle_distributed::{
    mesh::{DeviceMesh, Replica},
    train::{AdamW, DataParallel, Error, TrainingError},
    types::Seed,
};
use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, VarBuilder, linear, loss::cross_entropy};
use candle_transformers::models::bert::{BertModel, Config};

struct Classifier {
    bert: BertModel,
    head: Linear,
}

impl Classifier {
    fn new(vb: &VarBuilder<'_>) -> candle_core::Result<Self> {
        let config = Config {
            vocab_size: 50,
            hidden_size: 16,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            intermediate_size: 32,
            max_position_embeddings: 8,
            ..Config::default()
        };
        Ok(Self {
            bert: BertModel::load(vb.pp("bert"), &config)?,
            head: linear(16, 2, vb.pp("classifier"))?,
        })
    }

    fn loss(&self, ids: &Tensor, labels: &Tensor) -> candle_core::Result<Tensor> {
        let hidden = self.bert.forward(ids, &ids.zeros_like()?, None)?;
        let first = hidden.narrow(1, 0, 1)?.squeeze(1)?;
        cross_entropy(&self.head.forward(&first)?, labels)
    }
}

/// candle's layer norms have no backward, so gradients stop at the last one.
#[test]
fn bert_without_backward_is_rejected() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model = DataParallel::builder(&mesh, |vb| Classifier::new(&vb))
        .init(Seed::new(0))
        .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))
        .unwrap();
    let initial = bits(&model.parameters().unwrap());
    let ids = Tensor::arange(0_u32, 24, &Device::Cpu).unwrap().reshape((4, 6)).unwrap();
    let labels = Tensor::new(&[0_u32, 1, 1, 0], &Device::Cpu).unwrap();
    let result = model.step(
        (ids, labels),
        |_: &Replica, model: &Classifier, (ids, labels): (Tensor, Tensor)| {
            model.loss(&ids, &labels)
        },
    );
    let error = result.unwrap_err();
    let text = error.to_string();
    let Error::Training(TrainingError::NoGradient { missing, trained }) = error else {
        panic!("{error}")
    };
    assert_eq!((missing.len(), trained), (37, 39), "{missing:?}");
    assert!(missing.iter().all(|name| name.starts_with("bert.")), "{missing:?}");
    assert!(missing.contains(&"bert.embeddings.word_embeddings.weight".to_owned()));
    for fragment in ["37 of 39", "bert.embeddings.LayerNorm.bias", "fused_ops::layers"] {
        assert!(text.contains(fragment), "no {fragment:?} in {text:?}");
    }
    assert_eq!(bits(&model.parameters().unwrap()), initial, "a failed step changed the model");
}

/// Returns the values of all variables.
fn bits(variables: &BTreeMap<String, Tensor>) -> BTreeMap<String, Vec<u32>> {
    let mut bits = BTreeMap::new();
    for (name, tensor) in variables {
        let values: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
        bits.insert(name.clone(), values.into_iter().map(f32::to_bits).collect());
    }
    bits
}
