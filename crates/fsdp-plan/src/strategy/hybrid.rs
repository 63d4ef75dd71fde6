//! Each parameter by the rule that picks it.

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

/// The most rules. Each parameter is matched against all of them.
const MAX_RULES: usize = 4096;

/// The most bytes that the patterns of all rules may have together. A compiled pattern takes up to 140 times its text.
const MAX_PATTERN_BYTES: usize = 1 << 20;

/// Plans each parameter as the first of several rules says whose pattern picks it, or else by
/// default.
///
/// [`new`](Self::new) takes the two lists of the spec: what is cut like [`Full`](super::Full), and
/// what goes to ranks whole like [`LayerWise`]. [`with_rule`](Self::with_rule) adds rules one by
/// one, and a rules file is this type as JSON:
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
/// [`matches`](Self::matches) lists what each rule picks, what several pick, and what none does.
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
    #[serde(deserialize_with = "bounded")]
    rules: Vec<Rule>,
    #[serde(default)]
    default: Choice,
}

/// A pattern, and what becomes of the parameters it picks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Rule {
    /// Which parameters.
    pub pattern: Pattern,
    /// What becomes of them.
    pub choice: Choice,
}

/// What becomes of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Choice {
    /// It is cut over all ranks, in this layout.
    Full(Layout),
    /// It goes to a rank whole, with its layer, by [`LayerWise`] with its defaults.
    LayerWise,
    /// Every rank keeps a copy.
    Replicate,
}

impl Default for Choice {
    fn default() -> Self {
        Self::Full(Layout::Dim0)
    }
}

/// Which rules pick which parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Matches<'a> {
    /// The number of parameters that each rule decides.
    pub decided: Vec<usize>,
    /// Parameters that several rules pick, with the positions of these rules: the first one
    /// decides.
    pub overlaps: Vec<(&'a str, Vec<usize>)>,
    /// Parameters that no rule picks.
    pub unmatched: Vec<&'a str>,
}

impl Hybrid {
    /// Cuts what a pattern of `full` picks, and gives to ranks whole what only a pattern of
    /// `layer_wise` picks. What none picks is cut.
    ///
    /// # Errors
    ///
    /// As [`with_rule`](Self::with_rule).
    pub fn new<'a>(
        full: impl IntoIterator<Item = &'a str>,
        layer_wise: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self> {
        let full = full.into_iter().map(|pattern| (pattern, Choice::default()));
        let layer_wise = layer_wise.into_iter().map(|pattern| (pattern, Choice::LayerWise));
        let none = Self { rules: Vec::new(), default: Choice::default() };
        full.chain(layer_wise)
            .try_fold(none, |hybrid, (pattern, choice)| hybrid.with_rule(pattern, choice))
    }

    /// Adds a rule, which decides what no rule before it does.
    ///
    /// # Errors
    ///
    /// - [`Error::BadPattern`].
    /// - [`Error::TooManyRules`] above 4,096 rules.
    /// - [`Error::RulesTooLong`] if all patterns together have more than a mebibyte.
    pub fn with_rule(mut self, pattern: &str, choice: Choice) -> Result<Self> {
        push(&mut self.rules, Rule { pattern: pattern.parse()?, choice })?;
        Ok(self)
    }

    /// The rules. The first one that picks a parameter decides.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// What the rules pick among `parameters`, those left out that are gathered always or tied to
    /// others.
    pub fn matches<'a>(&self, parameters: &'a [ParameterInfo]) -> Matches<'a> {
        let mut matches = Matches { decided: vec![0; self.rules.len()], ..Matches::default() };
        for info in divisible(parameters) {
            let picking =
                (0..self.rules.len()).filter(|&rule| self.rules[rule].pattern.picks(info));
            let picking: Vec<_> = picking.collect();
            match picking[..] {
                [] => matches.unmatched.push(info.name()),
                [first] => matches.decided[first] += 1,
                [first, ..] => {
                    matches.decided[first] += 1;
                    matches.overlaps.push((info.name(), picking));
                }
            }
        }
        matches
    }

    fn choice(&self, info: &ParameterInfo) -> Choice {
        self.rules
            .iter()
            .find(|rule| rule.pattern.picks(info))
            .map_or(self.default, |rule| rule.choice)
    }
}

/// Cuts `transformer` and `attention`, gives `classifier`, `head` and `lm_head` to ranks whole.
///
/// The last is how language models name their head, which a search for `head` within names would
/// find as well.
impl Default for Hybrid {
    fn default() -> Self {
        let rule = |(pattern, choice)| Rule { pattern: Pattern::components(pattern), choice };
        let full = ["transformer", "attention"].map(|pattern| (pattern, Choice::default()));
        let layer_wise =
            ["classifier", "head", "lm_head"].map(|pattern| (pattern, Choice::LayerWise));
        Self {
            rules: full.into_iter().chain(layer_wise).map(rule).collect(),
            default: Choice::default(),
        }
    }
}

impl ShardingStrategy for Hybrid {
    fn name(&self) -> &'static str {
        "hybrid"
    }

    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
        let infos = divisible(parameters);
        // Parameters of choices that go together are planned together: they balance, or share
        // buffers, among themselves.
        let mut groups: Vec<Vec<(usize, Choice)>> = Vec::new();
        for (position, choice) in infos.iter().map(|info| self.choice(info)).enumerate() {
            match groups.iter_mut().find(|group| group[0].1.goes_with(choice)) {
                Some(group) => group.push((position, choice)),
                None => groups.push(vec![(position, choice)]),
            }
        }
        let mut cuts = vec![Cut::Replicated; infos.len()];
        for group in groups {
            let chosen: Vec<_> =
                group.iter().map(|&(position, choice)| (infos[position], choice)).collect();
            for ((position, _), cut) in group.into_iter().zip(cuts_of(&chosen, world_size)?) {
                cuts[position] = cut;
            }
        }
        assemble(self.name(), world_size, parameters, cuts)
    }
}

/// Adds a rule, unless there are too many then.
fn push(rules: &mut Vec<Rule>, rule: Rule) -> Result<()> {
    rules.push(rule);
    if rules.len() > MAX_RULES {
        return Err(Error::TooManyRules { max: MAX_RULES });
    }
    let n_bytes: usize = rules.iter().map(|rule| rule.pattern.n_bytes()).sum();
    if n_bytes > MAX_PATTERN_BYTES {
        return Err(Error::RulesTooLong { max: MAX_PATTERN_BYTES });
    }
    Ok(())
}

/// Reads rules one by one, so that at most one pattern beyond the limits is compiled.
fn bounded<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Rule>, D::Error> {
    struct Rules;

    impl<'de> Visitor<'de> for Rules {
        type Value = Vec<Rule>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of rules")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Rule>, A::Error> {
            let mut rules = Vec::new();
            while let Some(rule) = list.next_element()? {
                push(&mut rules, rule).map_err(A::Error::custom)?;
            }
            Ok(rules)
        }
    }

    deserializer.deserialize_seq(Rules)
}

impl Choice {
    fn goes_with(self, other: Self) -> bool {
        match (self, other) {
            (Self::Full(one), Self::Full(other)) => one.goes_with(other),
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

/// The cuts of parameters whose choices go with each other.
fn cuts_of(chosen: &[(&ParameterInfo, Choice)], group: WorldSize) -> Result<Vec<Cut>> {
    let infos: Vec<_> = chosen.iter().map(|&(info, _)| info).collect();
    match chosen.first() {
        Some((_, Choice::Full(_))) => {
            #[expect(clippy::expect_used, reason = "no other choice goes with a layout")]
            let layout = |choice: Choice| choice.layout().expect("a layout");
            let laid_out: Vec<_> =
                chosen.iter().map(|&(info, choice)| (info, layout(choice))).collect();
            layout::cuts(&laid_out, group)
        }
        Some((_, Choice::LayerWise)) => LayerWise::default().cuts(&infos, group),
        Some((_, Choice::Replicate)) | None => Ok(vec![Cut::Replicated; infos.len()]),
    }
}
