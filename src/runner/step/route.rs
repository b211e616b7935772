//! Decides what runs a step, and whether the step is queued, from [`RunnerFacts`] and [`StepFacts`] alone.
//!
//! The table in docs/scheduling.md lists the routes. A test compares the table with [`route`].

use std::fmt;

use serde::Serialize;

use super::sequence::StepSequence;
use crate::runner::limits::MAX_SEQUENCES;

/// What runs a step, and whether the step is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRoute {
    pub executor: StepExecutor,
    /// Whether the step is queued before the host knows the tokens of the previous step.
    /// Always false for steps on the decode graph, which queues its own steps.
    pub is_queued: bool,
}

/// What runs a step: a CUDA graph or the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepExecutor {
    /// The decode graph, for a single sequence. The graph also chooses the token, and `DecodeGraph` queues steps ahead.
    DecodeGraph,
    /// A batch graph: the CUDA graph of one padded batch size.
    BatchGraph,
    /// The decoder, which runs operation by operation.
    Eager,
}

/// How decode steps usually run while only one request is active.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExecutionMode {
    /// As a CUDA graph: the decode graph, or a batch graph of one sequence.
    Graph,
    /// Operation by operation, without a CUDA graph.
    Eager,
}

impl fmt::Display for ExecutionMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Graph => "graph",
            Self::Eager => "eager",
        })
    }
}

/// The properties of a runner that decide what runs a step.
#[derive(Clone, Copy, Debug)]
pub struct RunnerFacts {
    pub has_decode_graph: bool,
    /// Whether batch graphs can run the decode steps of the runner's model.
    pub has_batch_graphs: bool,
    /// Whether steps can be queued. The conditions are at `LoadOptions::queue_steps`.
    pub can_queue: bool,
    /// Whether several ranks run the model.
    pub has_several_ranks: bool,
    /// Whether `RunnerOptions::prompt_segments` is set, so that no result may depend on other sequences.
    pub is_deterministic: bool,
}

/// The properties of a step that decide what runs the step.
#[derive(Clone, Copy, Debug)]
pub struct StepFacts {
    pub sequences: usize,
    /// Whether every sequence has a single input token.
    pub is_decode: bool,
    /// Whether the step chooses a token for at least one sequence.
    pub chooses_tokens: bool,
    /// Whether a queued step could choose the tokens of all sequences that have a sampler.
    pub samplers_can_queue: bool,
    /// Whether the step has a single sequence whose sampler needs the whole row of logits.
    pub needs_logits: bool,
    /// Whether the step computes log probabilities of prompt tokens.
    pub has_scores: bool,
    /// Whether at least one sequence has `prompt_segments`, so that its results must not depend on other sequences.
    pub has_deterministic_sequence: bool,
}

impl StepFacts {
    /// A decode step of one sequence without a constraint, log probabilities or logit edits.
    pub const ONE_TOKEN: Self = Self {
        sequences: 1,
        is_decode: true,
        chooses_tokens: true,
        samplers_can_queue: true,
        needs_logits: false,
        has_scores: false,
        has_deterministic_sequence: false,
    };

    pub fn of(sequences: &[StepSequence]) -> Self {
        let samplers = || sequences.iter().filter_map(|sequence| sequence.sampler.as_deref());
        Self {
            sequences: sequences.len(),
            is_decode: sequences.iter().all(|sequence| sequence.ids.len() == 1),
            chooses_tokens: samplers().next().is_some(),
            samplers_can_queue: samplers().all(|sampler| sampler.can_queue()),
            needs_logits: sequences.len() == 1 && samplers().any(|sampler| sampler.needs_logits()),
            has_scores: sequences.iter().any(|sequence| sequence.scores.is_some()),
            has_deterministic_sequence: sequences.iter().any(|sequence| sequence.prompt_segments.is_some()),
        }
    }
}

/// Decides what runs a step, and whether the step is queued. Without `can_queue`, the step is not queued.
pub fn route(runner: RunnerFacts, step: StepFacts) -> StepRoute {
    let is_queued = is_queued(runner, step);
    let executor = if is_queued { batch_executor(runner, step) } else { unqueued_executor(runner, step) };
    StepRoute { executor, is_queued }
}

/// Returns whether a step is queued. Returns false for steps that the decode graph runs or can continue.
fn is_queued(runner: RunnerFacts, step: StepFacts) -> bool {
    let can_choose = runner.can_queue && step.chooses_tokens && step.samplers_can_queue;
    // Deterministic prompts run in one pass per prompt segment. Deterministic requests also decode in passes of their
    // own, unless the whole runner is deterministic. These passes leave no tokens on the device.
    let needs_own_passes = if runner.is_deterministic { !step.is_decode } else { step.has_deterministic_sequence };
    // The decode graph queues its own steps. It starts from the logits of the prompt's last chunk,
    // so a step with only one sequence is not queued even if it runs a chunk.
    let is_graph = runner.has_decode_graph && step.sequences == 1 && !step.needs_logits;
    can_choose && !step.has_scores && !needs_own_passes && !is_graph && step.sequences <= MAX_SEQUENCES
}

/// Decides what runs a step that is not queued.
fn unqueued_executor(runner: RunnerFacts, step: StepFacts) -> StepExecutor {
    // Batch graphs use a fixed order of additions only if the whole runner is deterministic.
    let needs_fixed_order = step.has_deterministic_sequence && !runner.is_deterministic;
    if !step.is_decode || step.has_scores || needs_fixed_order {
        return StepExecutor::Eager;
    }
    if step.sequences == 1 && !step.needs_logits {
        if runner.has_decode_graph && step.chooses_tokens {
            return StepExecutor::DecodeGraph;
        }
        // Few steps of a single sequence get here: most run on the decode graph or are queued.
        // On one GPU, unless the runner is deterministic, no batch graph is captured for these few steps.
        if !runner.is_deterministic && !runner.has_several_ranks {
            return StepExecutor::Eager;
        }
    }
    batch_executor(runner, step)
}

/// Returns `BatchGraph` if a batch graph can run the step, and otherwise `Eager`.
fn batch_executor(runner: RunnerFacts, step: StepFacts) -> StepExecutor {
    let can_run = runner.has_batch_graphs && step.is_decode && step.sequences <= MAX_SEQUENCES;
    if can_run { StepExecutor::BatchGraph } else { StepExecutor::Eager }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU with a model that the decode graph supports.
    const GPU: RunnerFacts = RunnerFacts {
        has_decode_graph: true,
        has_batch_graphs: true,
        can_queue: true,
        has_several_ranks: false,
        is_deterministic: false,
    };
    const SEVERAL_GPUS: RunnerFacts = RunnerFacts { has_several_ranks: true, ..GPU };
    /// A GPU with a model that the decode graph does not support.
    const NO_DECODE_GRAPH: RunnerFacts = RunnerFacts { has_decode_graph: false, ..GPU };
    const DETERMINISTIC: RunnerFacts = RunnerFacts { is_deterministic: true, ..NO_DECODE_GRAPH };
    const EAGER: RunnerFacts = RunnerFacts { has_batch_graphs: false, can_queue: false, ..NO_DECODE_GRAPH };
    const ONE: StepFacts = StepFacts::ONE_TOKEN;
    const ONE_CONSTRAINED: StepFacts = StepFacts { samplers_can_queue: false, needs_logits: true, ..ONE };
    const ONE_UNLIMITED: StepFacts = StepFacts { needs_logits: false, ..ONE_CONSTRAINED };
    const MANY: StepFacts = StepFacts { sequences: MAX_SEQUENCES, ..ONE };
    const MANY_CONSTRAINED: StepFacts = StepFacts { samplers_can_queue: false, ..MANY };
    const CHUNKS: StepFacts = StepFacts { is_decode: false, ..MANY };

    /// The rows of the table in docs/scheduling.md, each with examples of its runners and steps.
    const ROWS: &[(&str, &[RunnerFacts], &[StepFacts])] = &[
        ("decode step of one sequence", &[GPU, SEVERAL_GPUS], &[ONE]),
        (
            "decode step of one sequence with log probabilities, a logit bias, \
             or a minimum length that is not reached yet",
            &[GPU],
            &[StepFacts { needs_logits: true, ..ONE }],
        ),
        ("decode step of one sequence with a constraint", &[GPU], &[ONE_CONSTRAINED]),
        ("decode step of one sequence, model without a decode graph", &[NO_DECODE_GRAPH], &[ONE]),
        (
            "decode step of one sequence, model without a decode graph, \
             constraint that does not limit the next token",
            &[NO_DECODE_GRAPH],
            &[ONE_UNLIMITED],
        ),
        (
            "decode step of one sequence, model without a decode graph on several GPUs, \
             constraint that does not limit the next token",
            &[RunnerFacts { has_several_ranks: true, ..NO_DECODE_GRAPH }],
            &[ONE_UNLIMITED],
        ),
        ("decode step of 2 to 256 sequences", &[GPU, NO_DECODE_GRAPH], &[StepFacts { sequences: 2, ..MANY }, MANY]),
        ("decode step of 2 to 256 sequences, some with a constraint", &[GPU, NO_DECODE_GRAPH], &[MANY_CONSTRAINED]),
        ("step with chunks of prompts", &[GPU], &[CHUNKS]),
        (
            "step with chunks of prompts, if no sequence gets a token",
            &[GPU],
            &[StepFacts { chooses_tokens: false, ..CHUNKS }],
        ),
        (
            "step with a prompt chunk of a single sequence that will decode on the decode graph",
            &[GPU],
            &[StepFacts { sequences: 1, ..CHUNKS }],
        ),
        (
            "step that computes log probabilities of prompt tokens",
            &[GPU, DETERMINISTIC],
            &[StepFacts { has_scores: true, ..CHUNKS }],
        ),
        ("decode step with `--deterministic`", &[DETERMINISTIC], &[ONE, MANY]),
        (
            "decode step with `--deterministic`, some sequences with a constraint",
            &[DETERMINISTIC],
            &[ONE_CONSTRAINED, MANY_CONSTRAINED],
        ),
        ("step with chunks of prompts with `--deterministic`", &[DETERMINISTIC], &[CHUNKS]),
        (
            "step with a deterministic request, without `--deterministic`",
            &[GPU],
            &[
                StepFacts { has_deterministic_sequence: true, ..ONE },
                StepFacts { has_deterministic_sequence: true, ..MANY },
            ],
        ),
        ("any step with `--eager`, or on GPUs between which the host copies data", &[EAGER], &[ONE, MANY, CHUNKS]),
    ];

    #[test]
    fn the_table_in_the_documentation_is_right() {
        let page = include_str!("../../../docs/scheduling.md");
        let (_, table) = page.split_once("| step | runs as | queued ahead |\n").unwrap();
        let table: Vec<Vec<&str>> = table
            .lines()
            .skip(1)
            .take_while(|line| line.starts_with('|'))
            .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
            .collect();
        let names: Vec<&str> = table.iter().map(|row| row[0]).collect();
        assert_eq!(names, ROWS.iter().map(|(name, ..)| *name).collect::<Vec<_>>());
        for (row, (name, runners, steps)) in table.iter().zip(ROWS) {
            for &runner in *runners {
                for &step in *steps {
                    let StepRoute { executor, is_queued } = route(runner, step);
                    let runs_as = match executor {
                        StepExecutor::DecodeGraph => "decode graph",
                        StepExecutor::BatchGraph => "batch graph",
                        StepExecutor::Eager => "operation by operation",
                    };
                    let queued = match is_queued {
                        false if executor == StepExecutor::DecodeGraph => "by the graph itself",
                        false => "no",
                        true => "yes",
                    };
                    assert_eq!([runs_as, queued], row[1..], "{name}: {runner:?}, {step:?}");
                }
            }
        }
    }

    /// Every combination of the booleans of a runner and a step, each with several numbers of sequences.
    /// Steps of several sequences never have `needs_logits`.
    fn all_facts() -> impl Iterator<Item = (RunnerFacts, StepFacts)> {
        const COUNTS: [usize; 4] = [1, 2, MAX_SEQUENCES, MAX_SEQUENCES + 1];
        (0..1 << 11).flat_map(|bits: u32| {
            let is = move |bit: u32| bits & 1 << bit != 0;
            let runner = RunnerFacts {
                has_decode_graph: is(0),
                has_batch_graphs: is(1),
                can_queue: is(2),
                has_several_ranks: is(3),
                is_deterministic: is(4),
            };
            COUNTS.map(|sequences| {
                let step = StepFacts {
                    sequences,
                    is_decode: is(5),
                    chooses_tokens: is(6),
                    samplers_can_queue: is(7),
                    needs_logits: is(8) && sequences == 1,
                    has_scores: is(9),
                    has_deterministic_sequence: is(10),
                };
                (runner, step)
            })
        })
    }

    #[test]
    fn every_step_gets_an_executor_that_can_run_it() {
        for (runner, step) in all_facts() {
            let StepRoute { executor, is_queued } = route(runner, step);
            let can_run = match executor {
                StepExecutor::DecodeGraph => {
                    let is_one_token = step.sequences == 1 && step.is_decode && step.chooses_tokens;
                    !is_queued && runner.has_decode_graph && is_one_token && !step.needs_logits
                }
                StepExecutor::BatchGraph => {
                    runner.has_batch_graphs && step.is_decode && step.sequences <= MAX_SEQUENCES
                }
                StepExecutor::Eager => true,
            };
            let can_queue = runner.can_queue && step.chooses_tokens && step.samplers_can_queue;
            let is_separate = step.has_deterministic_sequence && !runner.is_deterministic;
            let is_eager = executor == StepExecutor::Eager;
            assert!(can_run, "{executor:?} cannot run {step:?} of {runner:?}");
            assert!(!is_queued || can_queue && !step.has_scores, "{step:?} of {runner:?} is queued, but must not be");
            assert!(
                !is_separate || is_eager && !is_queued,
                "{step:?} of {runner:?} must run operation by operation and unqueued"
            );
            assert!(!step.has_scores || is_eager, "only the decoder computes the scores of {step:?}");
            let unqueued = route(RunnerFacts { can_queue: false, ..runner }, step);
            assert!(!unqueued.is_queued);
            assert!(is_queued || unqueued.executor == executor, "only queued steps depend on `can_queue`: {step:?}");
        }
    }

    #[test]
    fn a_step_of_one_sequence_without_a_sampler_runs_operation_by_operation() {
        let step = StepFacts { chooses_tokens: false, ..ONE };
        assert_eq!(route(GPU, step), StepRoute { executor: StepExecutor::Eager, is_queued: false });
    }

    #[test]
    fn too_many_sequences_are_not_queued() {
        let step = StepFacts { sequences: MAX_SEQUENCES + 1, ..MANY };
        assert_eq!(route(GPU, step), StepRoute { executor: StepExecutor::Eager, is_queued: false });
    }
}
