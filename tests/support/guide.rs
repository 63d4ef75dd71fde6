//! The examples of the guide, compiled and run: an item for each page that has any. (Pages that are included from a crate are run
//! there.)

macro_rules! pages {
    ($($name:ident: $path:literal;)*) => {
        $(#[doc = include_str!($path)] pub struct $name;)*
    };
}

pages! {
    QuickStart: "../../docs/index.md";
    SplitData: "../../docs/guide/split-data.md";
    CutPadding: "../../docs/guide/cut-padding.md";
    WillItFit: "../../docs/guide/will-it-fit.md";
    TwoNodes: "../../docs/multi-node.md";
    Resume: "../../docs/guide/resume.md";
    TrainYourOwnModel: "../../docs/guide/train-your-own-model.md";
    Sharded: "../../docs/guide/from-one-device-to-a-sharded-model.md";
    ComingFromFsdp: "../../docs/guide/coming-from-fsdp.md";
    TrainableModels: "../../docs/guide/trainable-models.md";
    ComingFromAccelerate: "../../docs/guide/coming-from-accelerate.md";
    ComingFromLightning: "../../docs/guide/coming-from-lightning.md";
    ComingFromDeepSpeed: "../../docs/guide/coming-from-deepspeed.md";
    ComingFromTorchtune: "../../docs/guide/coming-from-torchtune.md";
    ComingFromJax: "../../docs/guide/coming-from-jax.md";
    ComingFromPyTorch: "../../docs/guide/coming-from-pytorch.md";
    Measured: "../../docs/guide/measured.md";
}
