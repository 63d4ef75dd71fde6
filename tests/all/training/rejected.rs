//! A model whose layers have no backward does not get past its first step.

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

/// Its layer norms have no backward, so the gradient of the loss ends at the last of them.
#[test]
fn bert_of_candle_transformers_is_refused_in_its_first_step_with_names() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model = DataParallel::builder(&mesh, |vb| Classifier::new(&vb))
        .init(Seed::new(0))
        .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))
        .unwrap();
    let before = bits(&model.parameters().unwrap());
    let ids = Tensor::arange(0_u32, 24, &Device::Cpu).unwrap().reshape((4, 6)).unwrap();
    let labels = Tensor::new(&[0_u32, 1, 1, 0], &Device::Cpu).unwrap();
    let loss = |_: &Replica, model: &Classifier, (ids, labels): (Tensor, Tensor)| {
        model.loss(&ids, &labels)
    };
    let error = model.step((ids, labels), loss).unwrap_err();
    let text = error.to_string();
    let Error::Training(TrainingError::NoGradient { missing, trained }) = error else {
        panic!("{error}")
    };
    assert_eq!((missing.len(), trained), (37, 39), "{missing:?}");
    assert!(missing.iter().all(|name| name.starts_with("bert.")), "{missing:?}");
    assert!(missing.contains(&"bert.embeddings.word_embeddings.weight".to_owned()));
    for part in ["37 of 39", "bert.embeddings.LayerNorm.bias", "fused_ops::layers"] {
        assert!(text.contains(part), "{part:?} in {text:?}");
    }
    assert_eq!(
        bits(&model.parameters().unwrap()),
        before,
        "a step that is refused changes nothing"
    );
}

/// The values of all variables.
fn bits(variables: &BTreeMap<String, Tensor>) -> Vec<(String, Vec<u32>)> {
    let bits = |tensor: &Tensor| -> Vec<u32> {
        let values: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    };
    variables.iter().map(|(name, tensor)| (name.clone(), bits(tensor))).collect()
}
