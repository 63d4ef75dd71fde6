//! Built-in short stories, generated from a small grammar.
//!
//! A small model learns such text in a minute, as in Eldan and Li's *Tiny Stories* (arXiv
//! 2305.07759), and a reader or the grammar can judge its sentences.

use core_types::Seed;

/// The number of stories, of about 310 bytes each: enough that a short run repeats few of them.
const N_STORIES: u64 = 2300;

const SEED: Seed = Seed::new(0);

const NAMES: &[&str] = &["Ada", "Ben", "Eva", "Gus", "Lily", "Max", "Rose", "Tom"];
const ANIMALS: &[&str] = &["bear", "cat", "dog", "fox", "frog", "mouse"];
const TRAITS: &[&str] = &["brave", "kind", "proud", "shy"];
const PLACES: &[&str] = &["bridge", "farm", "hill", "lake", "river", "tower"];
const THINGS: &[&str] = &["ball", "bell", "hat", "kite", "lamp"];
const LOOKS: &[&str] = &["big", "blue", "red", "small"];

/// The slots of sentences, and the words for each slot. A story uses one word per slot.
const SLOTS: [(&str, &[&str]); 11] = [
    ("hero", NAMES),
    ("friend", NAMES),
    ("animal", ANIMALS),
    ("other-animal", ANIMALS),
    ("trait", TRAITS),
    ("other-trait", TRAITS),
    ("home", PLACES),
    ("place", PLACES),
    ("thing", THINGS),
    ("look", LOOKS),
    ("mood", &["glad", "happy"]),
];

/// The parts of a story in order, each with alternative sentences.
const PARTS: [&[&str]; 10] = [
    &["Once there was a {trait} {animal} named {hero}."],
    &["{hero} lived near the {home}."],
    &["The {animal} liked to play.", "The {animal} liked the {home}."],
    &["One day {hero} went to the {place}."],
    &["There {hero} found a {look} {thing}.", "{hero} saw a {look} {thing} near the {place}."],
    &["Then a {other-trait} {other-animal} named {friend} came to the {place}."],
    &["{hero} gave the {thing} to {friend}.", "{friend} liked the {thing}."],
    &["They played with the {thing} all day.", "{hero} and {friend} played near the {place}."],
    &["They were {mood}.", "{friend} was {mood}."],
    &["At night {hero} went home.", "Then they went home to the {home}."],
];

/// Returns the stories, the same on every machine.
pub(crate) fn stories() -> impl Iterator<Item = String> {
    (0..N_STORIES).map(|index| generate_story(SEED.derive(index)))
}

/// Returns true if the grammar has this sentence.
#[cfg(test)]
pub(crate) fn parses(sentence: &str) -> bool {
    PARTS.iter().flat_map(|part| part.iter()).any(|pattern| has_form(sentence, pattern))
}

fn generate_story(seed: Seed) -> String {
    let mut draws = WordDraws { seed, n_drawn: 0 };
    let words: Vec<&str> = SLOTS.iter().map(|(_, list)| draws.draw_from(list)).collect();
    // Neighbors in `SLOTS` that share a list of words must get different words: the friend needs
    // another name than the hero, and the place must not be the home.
    if words.windows(2).any(|pair| pair[0] == pair[1]) {
        return generate_story(seed.derive(draws.n_drawn));
    }
    let sentences = PARTS.map(|part| fill_slots(draws.draw_from(part), &words));
    sentences.join(" ")
}

/// Fills each slot of a pattern with its word.
fn fill_slots(pattern: &str, words: &[&str]) -> String {
    let mut sentence = pattern.to_owned();
    for ((slot, _), word) in SLOTS.iter().zip(words) {
        sentence = sentence.replace(&format!("{{{slot}}}"), word);
    }
    sentence
}

/// Draws words that depend on a seed and on the number of words drawn before.
struct WordDraws {
    seed: Seed,
    n_drawn: u64,
}

impl WordDraws {
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn draw_from<'a>(&mut self, words: &[&'a str]) -> &'a str {
        let random = self.seed.derive(self.n_drawn).as_u64();
        self.n_drawn += 1;
        let index = usize::try_from(random % words.len() as u64)
            .expect("an index below a length is a usize");
        words[index]
    }
}

/// Returns true if the sentence is the pattern with a valid word in each slot.
#[cfg(test)]
fn has_form(sentence: &str, pattern: &str) -> bool {
    let found = sentence.split(' ');
    let expected = pattern.split(' ');
    found.clone().count() == expected.clone().count()
        && found.zip(expected).all(|(word, expected)| is_word_of(word, expected))
}

#[cfg(test)]
fn is_word_of(word: &str, expected: &str) -> bool {
    let Some((slot, end)) = expected.strip_prefix('{').and_then(|slot| slot.split_once('}')) else {
        return word == expected;
    };
    let words = SLOTS.iter().find(|(name, _)| *name == slot).map(|(_, words)| words);
    let word = word.strip_suffix(end);
    word.is_some_and(|word| words.is_some_and(|words| words.contains(&word)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn sentences(story: &str) -> impl Iterator<Item = &str> {
        story.split_inclusive('.').map(str::trim_start)
    }

    #[test]
    fn stories_never_change() {
        let first = [
            "Once there was a kind frog named Gus.",
            "Gus lived near the lake.",
            "The frog liked the lake.",
            "One day Gus went to the farm.",
            "There Gus found a red lamp.",
            "Then a shy mouse named Rose came to the farm.",
            "Rose liked the lamp.",
            "They played with the lamp all day.",
            "Rose was happy.",
            "Then they went home to the lake.",
        ];
        assert_eq!(stories().next().unwrap(), first.join(" "));
    }

    #[test]
    fn every_sentence_of_a_story_parses() {
        let mut words = BTreeSet::new();
        for story in stories() {
            assert_eq!(sentences(&story).count(), PARTS.len(), "{story}");
            assert!(sentences(&story).all(parses), "{story}");
            words.extend(story.split([' ', '.']).map(str::to_owned));
        }
        let n_bytes: usize = stories().map(|story| story.len()).sum();
        assert!((650_000..750_000).contains(&n_bytes), "{n_bytes}");
        assert!((60..=70).contains(&words.len()), "{}: {words:?}", words.len());
    }

    #[test]
    fn other_sentences_do_not_parse() {
        assert!(parses("Eva lived near the river."));
        for other in [
            "",
            "Eva",
            "Eva lived near the river",
            "eva lived near the river.",
            "Eva lived near the fox.",
            "Eva lived near near the river.",
            "Eva lived near the.",
            "Eva lived near the river. Eva",
            "Eva lived near river the.",
        ] {
            assert!(!parses(other), "{other}");
        }
    }
}
