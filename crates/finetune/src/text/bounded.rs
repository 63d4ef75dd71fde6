//! Bounds the values that a template writes or compares.
//!
//! A short template can make a value that contains itself, or `{% set x = [x, x] %}` forty times. To
//! write such a value takes all memory, and minijinja's fuel pays for a text only when it exists. So
//! the size of lists and mappings is checked before an operation reads them whole. Two operations are
//! not checked, which could take much time but no memory: a chain such as `a < b < c`, and a list as
//! the key of a mapping.

use minijinja::{
    Environment, Error, ErrorKind, Output, State, Value, escape_formatter,
    machinery::{Instruction, Instructions},
    value::{Rest, ValueKind},
};

/// The maximum size of a list or mapping that is written: the sum of its texts, and of the depths of
/// its items, which are their indentation.
pub(super) const MAX_VALUE_BYTES: usize = 1 << 20;

/// The filter that stands for `~`.
const CONCAT: &str = "checked_concat";

/// Declares filters or tests by their names, each with the name of the one that checks its arguments.
macro_rules! checked {
    ($($name:literal)*) => { &[$(($name, concat!("checked_", $name))),*] };
}

/// Filters that may write, compare or hash whole values, or pass them to other filters and tests.
const FILTERS: &[(&str, &str)] = checked![
    "lower" "upper" "title" "capitalize" "replace" "trim" "join" "split" "lines" "string" "indent"
    "format" "pprint" "escape" "e" "min" "max" "sort" "unique" "groupby" "dictsort" "map" "select"
    "reject" "selectattr" "rejectattr"
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
    for &(name, checked) in FILTERS {
        environment.add_filter(checked, move |state: &mut State<'_, '_>, args: Rest<Value>| {
            check_values(state, &args.0)?;
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

/// Returns the instructions of a template with operations that check their values.
pub(super) fn checked_instructions<'s>(instructions: &Instructions<'s>) -> Instructions<'s> {
    let mut checked = Instructions::new(instructions.name(), instructions.source());
    for at in 0.. {
        let Some(instruction) = instructions.get(at) else { break };
        let line = instructions.get_line(at).and_then(|line| u16::try_from(line).ok());
        checked.add_with_line(checked_instruction(instruction), line.unwrap_or(u16::MAX));
    }
    checked
}

fn checked_instruction<'s>(instruction: &Instruction<'s>) -> Instruction<'s> {
    let find = |names: &[(&str, &'static str)], wanted: &str| {
        names.iter().find(|(name, _)| *name == wanted).map(|(_, checked)| *checked)
    };
    let test =
        |name| find(TESTS, name).map(|name| Instruction::PerformTest(name, Some(2), NO_LOCAL));
    let checked = match *instruction {
        Instruction::StringConcat => Some(Instruction::ApplyFilter(CONCAT, Some(2), NO_LOCAL)),
        Instruction::Eq => test("eq"),
        Instruction::Ne => test("ne"),
        Instruction::Lt => test("lt"),
        Instruction::Lte => test("le"),
        Instruction::Gt => test("gt"),
        Instruction::Gte => test("ge"),
        Instruction::In => test("in"),
        Instruction::ApplyFilter(name, count, _) => {
            find(FILTERS, name).map(|checked| Instruction::ApplyFilter(checked, count, NO_LOCAL))
        }
        Instruction::PerformTest(name, count, _) => {
            find(TESTS, name).map(|checked| Instruction::PerformTest(checked, count, NO_LOCAL))
        }
        _ => None,
    };
    checked.unwrap_or_else(|| instruction.clone())
}

/// Checks that no list or mapping of these values is larger than [`MAX_VALUE_BYTES`].
pub(super) fn check_values<'v>(
    state: &State<'_, '_>,
    values: impl IntoIterator<Item = &'v Value>,
) -> Result<(), Error> {
    let mut free = MAX_VALUE_BYTES;
    for value in values.into_iter().filter(|value| value.as_object().is_some()) {
        take_size(value, 0, &mut free)?;
    }
    state.consume_fuel((MAX_VALUE_BYTES - free) as u64 / 64)
}

/// Takes the size of a value at this depth from the bytes that are free.
fn take_size(value: &Value, depth: usize, free: &mut usize) -> Result<(), Error> {
    let size = value.as_str().map_or(0, str::len) + depth + 1;
    *free = free.checked_sub(size).ok_or_else(|| {
        let message = format!("a value is larger than {MAX_VALUE_BYTES} bytes");
        Error::new(ErrorKind::InvalidOperation, message)
    })?;
    let is_mapping = value.kind() == ValueKind::Map;
    if is_mapping || matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
        for item in value.try_iter()? {
            take_size(&item, depth + 1, free)?;
            if is_mapping {
                take_size(&value.get_item(&item)?, depth + 1, free)?;
            }
        }
    }
    Ok(())
}
