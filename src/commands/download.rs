//! `inferno download`

use std::collections::HashMap;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Mutex;

use anyhow::Result;
use indicatif::{MultiProgress, ProgressBar};

use super::{stderr_target, style};
use crate::hub::{Hub, Progress, Snapshot};

/// Fetch a model from the Hugging Face hub
#[derive(clap::Args)]
pub struct Args {
    /// Repository, such as openai/gpt-oss-20b
    repo: String,
    /// Branch, tag or commit
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Weight files to fetch, such as '*Q4_K_M*', instead of all of the model's safetensors; may be given again
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let bars = Bars::new();
    let hub = Hub::from_env()?;
    let snapshot = hub.download(&args.repo, args.revision.as_deref(), &args.include, &bars)?;
    bars.finish();
    let mut err = std::io::stderr();
    writeln!(err, "{} is in {}", snapshot.name, snapshot.path.display())?;
    // Only a part may have been asked for.
    for model in snapshot.models().iter().filter(|model| hub.find(&model.name, None).is_ok()) {
        writeln!(err, "chat with it: inferno play {}", model.name)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// One bar a file that is under way, and one for all of them.
struct Bars {
    all: MultiProgress,
    total: ProgressBar,
    files: Mutex<HashMap<String, File>>,
}

struct File {
    size: u64,
    done: u64,
    bar: Option<ProgressBar>,
}

impl Bars {
    fn new() -> Self {
        let all = MultiProgress::with_draw_target(stderr_target());
        let total = all.add(ProgressBar::new(0));
        total.set_style(style("{msg:40!} {wide_bar} {bytes:>11}/{total_bytes:11} {bytes_per_sec:>13} {eta:>4}"));
        total.set_message("all files");
        Self { all, total, files: Mutex::new(HashMap::new()) }
    }

    fn finish(&self) {
        self.total.finish_and_clear();
    }
}

impl Progress for Bars {
    fn already_there(&self, _: &Snapshot) {
        let _ = writeln!(std::io::stderr(), "nothing to fetch, it is all here");
    }

    fn start(&self, files: &[(String, u64)]) {
        self.total.set_length(files.iter().map(|(_, size)| size).sum());
        let entry = |(name, size): &(String, u64)| (name.clone(), File { size: *size, done: 0, bar: None });
        *self.files.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = files.iter().map(entry).collect();
    }

    fn file(&self, name: &str, done_bytes: u64) {
        let mut files = self.files.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let Some(file) = files.get_mut(name) else { return };
        file.done = done_bytes;
        if done_bytes >= file.size {
            if let Some(bar) = file.bar.take() {
                bar.finish_and_clear();
            }
        } else {
            let bar = file.bar.get_or_insert_with(|| {
                let bar = self.all.insert_before(&self.total, ProgressBar::new(file.size));
                bar.set_style(style("{msg:40!} {wide_bar} {bytes:>11}/{total_bytes:11} {bytes_per_sec:>13} {eta:>4}"));
                bar.set_message(name.to_string());
                bar
            });
            bar.set_position(done_bytes);
        }
        self.total.set_position(files.values().map(|file| file.done.min(file.size)).sum());
    }
}
