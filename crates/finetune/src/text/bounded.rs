//! Bounds the values that a template writes or compares.
//!
//! A short template can make a value that contains itself, or `{% set x = [x, x] %}` forty times. To
//! write such a value takes all memory, and minijinja's fuel pays for a text only when it exists. So
//! the size of lists and mappings is checked before an operation reads them whole.

use minijinja::{
    Environment, Error, ErrorKind, Output, State, Value, escape_formatter,
    machinery::{Instruction, Instructions},
    value::{Rest, Serde, ValueKind},
};
use serde::{Serialize, Serializer};

/// The maximum size of a list or mapping that is written: the sum of its texts, and of the depths of
/// its items, which are their indentation.
pub(super) const MAX_VALUE_BYTES: usize = 1 << 20;

/// The maximum size of the arguments of a filter that uses them for each item.
const MAX_ARGUMENT_BYTES: usize = 1 << 12;

/// The filter that stands for `~`.
const CONCAT: &str = "checked_concat";

/// The filter that stands for `{key: value}`, whose keys are hashed.
const MAPPING: &str = "checked_mapping";

/// The filter that stands for the method `changed` of a loop, which compares its arguments.
const CHANGED: &str = "checked_changed";

/// The filter that checks a value, and returns nothing of use.
const CHECK: &str = "check";

/// Declares filters or tests by their names, each with the name of the one that checks its arguments.
macro_rules! checked {
    ($($name:literal)*) => { &[$(($name, concat!("checked_", $name))),*] };
}

/// Filters that may write, compare or hash whole values.
const FILTERS: &[(&str, &str)] = checked![
    "attr" "safe" "urlencode" "lower" "upper" "title" "capitalize" "replace" "trim" "split" "lines"
    "string" "indent" "format" "pprint" "escape" "e"
];

/// Filters of items, which use their arguments for each item, or pass them to other filters and tests.
const ITEM_FILTERS: &[(&str, &str)] = checked![
    "join" "min" "max" "sum" "sort" "unique" "groupby" "dictsort" "map" "select" "reject" "selectattr"
    "rejectattr"
];

/// Tests that may write or compare whole values.
const TESTS: &[(&str, &str)] = checked![
    "eq" "equalto" "==" "ne" "!=" "lt" "lessthan" "<" "le" "<=" "gt" "greaterthan" ">" "ge" ">="
    "in" "lower" "upper" "startingwith" "endingwith"
];

/// A number of a filter or test that is looked up by its name.
const NO_LOCAL: u8 = u8::MAX;

/// Adds the checking filters and tests, and a formatter that checks.
pub(super) fn add_checks(environment: &mut Environment<'_>) {
    environment.add_filter(CONCAT, |state: &mut State<'_, '_>, left: &Value, right: &Value| {
        check_values(state, [left, right])?;
        Ok::<_, Error>(format!("{left}{right}"))
    });
    environment.add_filter(MAPPING, |state: &mut State<'_, '_>, args: Rest<Value>| {
        let (pairs, _) = args.as_chunks::<2>();
        check_values(state, pairs.iter().map(|[key, _]| key))?;
        Ok::<_, Error>(Value::from(Serde(&Pairs(pairs))))
    });
    environment.add_filter(CHANGED, |state: &mut State<'_, '_>, args: Rest<Value>| {
        check_values(state, &args.0)?;
        args[0].call_method(state, "changed", &args[1..])
    });
    environment
        .add_filter(CHECK, |state: &mut State<'_, '_>, value: &Value| check_values(state, [value]));
    for &(name, checked) in FILTERS {
        environment.add_filter(checked, move |state: &mut State<'_, '_>, args: Rest<Value>| {
            check_values(state, &args.0)?;
            state.apply_filter(name, &args)
        });
    }
    for &(name, checked) in ITEM_FILTERS {
        environment.add_filter(checked, move |state: &mut State<'_, '_>, args: Rest<Value>| {
            check_values(state, args.first())?;
            let mut budget = Budget { max: MAX_ARGUMENT_BYTES, free: MAX_ARGUMENT_BYTES };
            args.iter().skip(1).try_for_each(|argument| budget.take(argument, 0))?;
            state.apply_filter(name, &args)
        });
    }
    for &(name, checked) in TESTS {
        environment.add_test(checked, move |state: &mut State<'_, '_>, args: Rest<Value>| {
            check_values(state, &args.0)?;
            state.perform_test(name, &args)
        });
    }
    environment.set_formatter(|out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value| {
        check_values(state, [value])?;
        escape_formatter(out, state, value)
    });
}

/// The keys and values of a mapping, in their order.
struct Pairs<'a>(&'a [[Value; 2]]);

impl Serialize for Pairs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|[key, value]| (key, value)))
    }
}

/// Returns the instructions of a template with operations that check their values.
pub(super) fn checked_instructions<'s>(instructions: &Instructions<'s>) -> Instructions<'s> {
    let all = (0..).map_while(|at| instructions.get(at));
    let groups: Vec<_> =
        all.map(|one| [checks_before(one), vec![checked_instruction(one)]].concat()).collect();
    // The last jump may lead behind the last instruction.
    let mut starts = vec![0];
    for group in &groups {
        starts.push(starts[starts.len() - 1] + group.len());
    }
    let mut checked = Instructions::new(instructions.name(), instructions.source());
    for (at, group) in (0..).zip(groups) {
        let line = instructions.get_line(at).and_then(|line| u16::try_from(line).ok());
        for instruction in group {
            let moved = with_moved_target(instruction, &starts);
            checked.add_with_line(moved, line.unwrap_or(u16::MAX));
        }
    }
    checked
}

/// Returns instructions that check operands of this one, and leave them on the stack.
fn checks_before(instruction: &Instruction<'_>) -> Vec<Instruction<'static>> {
    let check_top = [
        Instruction::DupTop,
        Instruction::ApplyFilter(CHECK, Some(1), NO_LOCAL),
        Instruction::DiscardTop,
    ];
    match instruction {
        // A key, which is hashed.
        Instruction::GetItem => check_top.to_vec(),
        // `a < b` in `a < b < c`. Both operands are checked, the upper one last.
        Instruction::CompareAndPreserve(_) => {
            let below = [&[Instruction::Swap], &check_top[..], &[Instruction::Swap]].concat();
            [&below[..], &check_top].concat()
        }
        _ => Vec::new(),
    }
}

/// Returns a jump to the place where its target is now.
fn with_moved_target<'s>(mut instruction: Instruction<'s>, starts: &[usize]) -> Instruction<'s> {
    use Instruction as I;
    if let I::Iterate(target)
    | I::Jump(target)
    | I::JumpIfFalse(target)
    | I::JumpIfFalseOrPop(target)
    | I::JumpIfTrueOrPop(target)
    | I::BuildMacro(_, target, _) = &mut instruction
    {
        #[expect(clippy::cast_possible_truncation, reason = "a short source has few instructions")]
        let moved = starts[*target as usize] as u32;
        *target = moved;
    }
    instruction
}

fn checked_instruction<'s>(instruction: &Instruction<'s>) -> Instruction<'s> {
    let find = |names: &[(&str, &'static str)], wanted: &str| {
        names.iter().find(|(name, _)| *name == wanted).map(|(_, checked)| *checked)
    };
    let test =
        |name| find(TESTS, name).map(|name| Instruction::PerformTest(name, Some(2), NO_LOCAL));
    let checked = match *instruction {
        Instruction::StringConcat => Some(Instruction::ApplyFilter(CONCAT, Some(2), NO_LOCAL)),
        Instruction::BuildMap(pairs @ 1..) => {
            let count = u16::try_from(2 * pairs).ok();
            Some(Instruction::ApplyFilter(MAPPING, count, NO_LOCAL))
        }
        Instruction::CallMethod("changed", count) => {
            Some(Instruction::ApplyFilter(CHANGED, count, NO_LOCAL))
        }
        Instruction::Eq => test("eq"),
        Instruction::Ne => test("ne"),
        Instruction::Lt => test("lt"),
        Instruction::Lte => test("le"),
        Instruction::Gt => test("gt"),
        Instruction::Gte => test("ge"),
        Instruction::In => test("in"),
        Instruction::ApplyFilter(name, count, _) => {
            let checked = find(FILTERS, name).or_else(|| find(ITEM_FILTERS, name));
            checked.map(|checked| Instruction::ApplyFilter(checked, count, NO_LOCAL))
        }
        Instruction::PerformTest(name, count, _) => {
            find(TESTS, name).map(|checked| Instruction::PerformTest(checked, count, NO_LOCAL))
        }
        _ => None,
    };
    checked.unwrap_or_else(|| instruction.clone())
}

/// Checks that the lists and mappings of these values have at most [`MAX_VALUE_BYTES`] together.
pub(super) fn check_values<'v>(
    state: &State<'_, '_>,
    values: impl IntoIterator<Item = &'v Value>,
) -> Result<(), Error> {
    let mut budget = Budget { max: MAX_VALUE_BYTES, free: MAX_VALUE_BYTES };
    for value in values.into_iter().filter(|value| value.as_object().is_some()) {
        budget.take(value, 0)?;
    }
    state.consume_fuel((MAX_VALUE_BYTES - budget.free) as u64 / 64)
}

/// The bytes that values may still have.
struct Budget {
    max: usize,
    free: usize,
}

impl Budget {
    /// Takes the size of a value at this depth.
    fn take(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let size = value.as_str().map_or(0, str::len) + depth + 1;
        self.free = self.free.checked_sub(size).ok_or_else(|| {
            let message = format!("a value is larger than {} bytes", self.max);
            Error::new(ErrorKind::InvalidOperation, message)
        })?;
        let is_mapping = value.kind() == ValueKind::Map;
        if is_mapping || matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
            for item in value.try_iter()? {
                self.take(&item, depth + 1)?;
                if is_mapping {
                    self.take(&value.get_item(&item)?, depth + 1)?;
                }
            }
        }
        Ok(())
    }
}
