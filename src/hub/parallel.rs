//! [`try_map`]: applies a function to many items with several threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::Result;

/// Applies `function` to all items on at most `threads` threads. Returns the results in the order of the items.
///
/// After a call fails, skips the items that no thread has taken yet, waits for the running calls, and returns the error
/// that occurred first.
pub(super) fn try_map<T: Sync, R: Send>(
    items: &[T],
    threads: usize,
    function: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Ok(Vec::with_capacity(items.len())));
    let run = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return };
            let result = function(item);
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            match (&mut *results, result) {
                (Ok(results), Ok(result)) => results.push((index, result)),
                (Ok(_), Err(error)) => {
                    next.store(items.len(), Ordering::Relaxed);
                    *results = Err(error);
                }
                (Err(_), _) => {}
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..threads.min(items.len()) {
            scope.spawn(run);
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner)?;
    results.sort_unstable_by_key(|(index, _)| *index);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn results_are_in_order_and_the_first_failure_is_returned() {
        let numbers: Vec<usize> = (0..1000).collect();
        let doubled = try_map(&numbers, 4, |number| Ok(number * 2)).unwrap();
        assert!(doubled.iter().enumerate().all(|(index, number)| *number == index * 2) && doubled.len() == 1000);
        assert!(try_map(&numbers[..0], 4, |number| Ok(*number)).unwrap().is_empty());
        let failing = |number: &usize| if *number == 500 { bail!("{number} is bad") } else { Ok(()) };
        assert_eq!(try_map(&numbers, 4, failing).unwrap_err().to_string(), "500 is bad");
    }
}
