//! Rules that choose a strategy for each parameter.

use std::fmt;

use core_types::WorldSize;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error as _, SeqAccess, Visitor},
};

use super::{LayerWise, Layout, ShardingStrategy, assemble, divisible, layout};
use crate::{
    cut::Cut,
    error::{Error, Result},
    param::ParameterInfo,
    pattern::Pattern,
    plan::ShardingPlan,
};

/// Limit on the number of rules. Each parameter is matched against all rules.
const MAX_RULES: usize = 4096;

/// Limit on the bytes of all patterns together. A compiled pattern takes up to 140 times its text.
const MAX_PATTERN_BYTES: usize = 1 << 20;

/// Plans each parameter by the first rule whose pattern matches it, or else by the default.
///
/// [`new`](Self::new) takes two lists: patterns of parameters that are cut as by
/// [`Full`](super::Full), and patterns of parameters that stay whole as by [`LayerWise`].
/// [`with_rule`](Self::with_rule) adds single rules. A rules file is this type as JSON:
///
/// ```json
/// {
///   "rules": [
///     {"pattern": "lm_head", "choice": "layer_wise"},
///     {"pattern": "**.norm.*", "choice": "replicate"},
///     {"pattern": "model.layers.*.mlp.**", "choice": {"full": {"row_ragged": {"rows": 1}}}}
///   ],
///   "default": {"full": "dim0"}
/// }
/// ```
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{
///     Cut, ElemType, ParameterInfo,
///     strategy::{Choice, Hybrid, ShardingStrategy},
/// };
///
/// let parameters = [
///     ParameterInfo::new("transformer.h.0.weight", [8, 8], ElemType::F32)?,
///     ParameterInfo::new("transformer.ln_f.weight", [8], ElemType::F32)?,
///     ParameterInfo::new("lm_head.weight", [100, 8], ElemType::F32)?,
/// ];
/// let hybrid = Hybrid::new(["transformer"], ["lm_head"])?;
/// let plan = hybrid.plan(&parameters, WorldSize::new(2)?)?;
/// assert_eq!(plan.parameters()[1].cut(), Cut::Dim0);
/// assert!(matches!(plan.parameters()[2].cut(), Cut::Whole { .. }));
///
/// let hybrid = Hybrid::default().with_rule("*.ln_f.*", Choice::Replicate)?;
/// let plan = hybrid.plan(&parameters, WorldSize::new(2)?)?;
/// assert_eq!(plan.parameters()[1].cut(), Cut::Dim0); // the rule for `transformer` comes first
/// assert_eq!(hybrid.matches(&parameters).overlaps, [("transformer.ln_f.weight", vec![0, 5])]);
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hybrid {
    #[serde(deserialize_with = "deserialize_rules")]
    rules: Vec<HybridRule>,
    #[serde(default)]
    default: Choice,
}

/// A pattern and the choice for the parameters it matches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HybridRule {
    /// Pattern of names or layers.
    pattern: Pattern,
    /// Choice for the matched parameters.
    choice: Choice,
}

/// The treatment of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Choice {
    /// Cuts the parameter over all ranks, in this layout.
    Full(Layout),
    /// Keeps the parameter whole on one rank, together with its layer, like the default
    /// [`LayerWise`].
    LayerWise,
    /// Keeps a copy of the parameter on every rank.
    Replicate,
}

impl Default for Choice {
    fn default() -> Self {
        Self::Full(Layout::Dim0)
    }
}

/// The parameters that each rule matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Matches<'a> {
    /// Number of parameters that each rule decides.
    pub decided: Vec<usize>,
    /// Parameters that several rules match, with the indices of these rules; the first one decides.
    pub overlaps: Vec<(&'a str, Vec<usize>)>,
    /// Parameters that no rule matches.
    pub unmatched: Vec<&'a str>,
}

impl Hybrid {
    /// Cuts parameters that match a pattern of `full`, and assigns parameters that match only a
    /// pattern of `layer_wise` to ranks whole. Unmatched parameters are cut.
    ///
    /// # Errors
    ///
    /// The errors of [`with_rule`](Self::with_rule).
    pub fn new<'a>(
        full: impl IntoIterator<Item = &'a str>,
        layer_wise: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self> {
        let mut hybrid = Self { rules: Vec::new(), default: Choice::default() };
        for pattern in full {
            hybrid = hybrid.with_rule(pattern, Choice::default())?;
        }
        for pattern in layer_wise {
            hybrid = hybrid.with_rule(pattern, Choice::LayerWise)?;
        }
        Ok(hybrid)
    }

    /// Adds a rule for parameters that no earlier rule matches.
    ///
    /// # Errors
    ///
    /// - [`Error::InvalidPattern`] for a malformed pattern.
    /// - [`Error::TooManyRules`] above 4,096 rules, or if all patterns together exceed a mebibyte.
    pub fn with_rule(mut self, pattern: &str, choice: Choice) -> Result<Self> {
        push_rule(&mut self.rules, HybridRule { pattern: pattern.parse()?, choice })?;
        Ok(self)
    }

    /// Lists the matches of all rules, without parameters that are always gathered or tied.
    #[doc(hidden)]
    pub fn matches<'a>(&self, parameters: &'a [ParameterInfo]) -> Matches<'a> {
        let mut matches = Matches { decided: vec![0; self.rules.len()], ..Matches::default() };
        for info in divisible(parameters) {
            let rules = (0..self.rules.len())
                .filter(|&rule| self.rules[rule].pattern.matches_parameter(info))
                .collect::<Vec<_>>();
            match rules[..] {
                [] => matches.unmatched.push(info.name()),
                [first] => matches.decided[first] += 1,
                [first, ..] => {
                    matches.decided[first] += 1;
                    matches.overlaps.push((info.name(), rules));
                }
            }
        }
        matches
    }

    /// Returns the choice for a parameter.
    fn choice(&self, info: &ParameterInfo) -> Choice {
        for rule in &self.rules {
            if rule.pattern.matches_parameter(info) {
                return rule.choice;
            }
        }
        self.default
    }
}

/// The default rules cut `transformer` and `attention`, and assign `classifier`, `head` and
/// `lm_head` to ranks whole.
///
/// Language models call their head `lm_head`; patterns match only whole components, so `head` does
/// not cover it.
impl Default for Hybrid {
    fn default() -> Self {
        let rules = [
            ("transformer", Choice::default()),
            ("attention", Choice::default()),
            ("classifier", Choice::LayerWise),
            ("head", Choice::LayerWise),
            ("lm_head", Choice::LayerWise),
        ];
        let rules =
            rules.map(|(text, choice)| HybridRule { pattern: Pattern::components(text), choice });
        Self { rules: rules.to_vec(), default: Choice::default() }
    }
}

impl ShardingStrategy for Hybrid {
    fn name(&self) -> &'static str {
        "hybrid"
    }

    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
        let infos = divisible(parameters);
        // Parameters with compatible choices are planned together, because they share buffers or are balanced as one
        // set.
        let mut groups: Vec<Vec<(usize, Choice)>> = Vec::new();
        for (position, choice) in infos.iter().map(|info| self.choice(info)).enumerate() {
            let group = groups.iter_mut().find(|group| {
                let (_, first_choice) = group[0];
                first_choice.is_compatible(choice)
            });
            match group {
                Some(group) => group.push((position, choice)),
                None => groups.push(vec![(position, choice)]),
            }
        }
        let mut cuts = vec![Cut::Replicated; infos.len()];
        for group in groups {
            let with_choices: Vec<_> =
                group.iter().map(|&(position, choice)| (infos[position], choice)).collect();
            let group_cuts = cut_group(&with_choices, world_size)?;
            for ((position, _), cut) in group.into_iter().zip(group_cuts) {
                cuts[position] = cut;
            }
        }
        assemble(self.name(), world_size, parameters, cuts)
    }
}

/// Adds a rule and checks the limits.
fn push_rule(rules: &mut Vec<HybridRule>, rule: HybridRule) -> Result<()> {
    rules.push(rule);
    if rules.len() > MAX_RULES {
        return Err(Error::TooManyRules { what: "rules", max: MAX_RULES });
    }
    let n_bytes: usize = rules.iter().map(|rule| rule.pattern.n_bytes()).sum();
    if n_bytes > MAX_PATTERN_BYTES {
        let what = "bytes in the patterns of the rules";
        return Err(Error::TooManyRules { what, max: MAX_PATTERN_BYTES });
    }
    Ok(())
}

/// Deserializes rules one by one and stops at the limits, so that at most one excess pattern is
/// compiled.
fn deserialize_rules<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<HybridRule>, D::Error> {
    struct RulesVisitor;

    impl<'de> Visitor<'de> for RulesVisitor {
        type Value = Vec<HybridRule>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of rules")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<HybridRule>, A::Error> {
            let mut rules = Vec::new();
            while let Some(rule) = list.next_element()? {
                push_rule(&mut rules, rule).map_err(A::Error::custom)?;
            }
            Ok(rules)
        }
    }

    deserializer.deserialize_seq(RulesVisitor)
}

impl Choice {
    /// Returns true if parameters with either choice are planned together.
    fn is_compatible(self, other: Self) -> bool {
        match (self, other) {
            (Self::Full(one), Self::Full(other)) => one.is_compatible(other),
            (Self::LayerWise, Self::LayerWise) | (Self::Replicate, Self::Replicate) => true,
            (Self::Full(_) | Self::LayerWise | Self::Replicate, _) => false,
        }
    }

    fn layout(self) -> Option<Layout> {
        match self {
            Self::Full(layout) => Some(layout),
            Self::LayerWise | Self::Replicate => None,
        }
    }
}

/// Cuts parameters with compatible choices.
fn cut_group(chosen: &[(&ParameterInfo, Choice)], group: WorldSize) -> Result<Vec<Cut>> {
    let infos: Vec<_> = chosen.iter().map(|&(info, _)| info).collect();
    match chosen.first() {
        Some((_, Choice::Full(_))) => {
            let mut with_layouts = Vec::with_capacity(chosen.len());
            for &(info, choice) in chosen {
                #[expect(
                    clippy::expect_used,
                    reason = "only layouts are compatible with a layout"
                )]
                with_layouts.push((info, choice.layout().expect("a layout")));
            }
            layout::cuts(&with_layouts, group)
        }
        Some((_, Choice::LayerWise)) => LayerWise::default().cuts(&infos, group),
        Some((_, Choice::Replicate)) | None => Ok(vec![Cut::Replicated; infos.len()]),
    }
}
