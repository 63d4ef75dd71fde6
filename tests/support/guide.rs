//! Compiles and runs the examples of the guide: one item per page with Rust on it.

macro_rules! pages {
    ($($name:ident: $path:literal;)*) => {
        $(#[doc = include_str!($path)] pub struct $name;)*
    };
}

pages! {
    QuickStart: "../../docs/index.md";
    ReadMyData: "../../docs/guide/read-my-data.md";
    SplitData: "../../docs/guide/split-data.md";
    CutPadding: "../../docs/guide/cut-padding.md";
    WillItFit: "../../docs/guide/will-it-fit.md";
    TwoNodes: "../../docs/multi-node.md";
    Resume: "../../docs/guide/resume.md";
    TrainYourOwnModel: "../../docs/guide/train-your-own-model.md";
    Sharded: "../../docs/guide/from-one-device-to-a-sharded-model.md";
    TrainableModels: "../../docs/guide/trainable-models.md";
    ComingFromTrainers: "../../docs/guide/coming-from-trainers.md";
    ComingFromJax: "../../docs/guide/coming-from-jax.md";
    ComingFromPyTorch: "../../docs/guide/coming-from-pytorch.md";
}
